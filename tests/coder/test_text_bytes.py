"""Bytes at the edges of text: what the file tools compare, and what they leave as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.tool import TOOLS, ToolContext, ToolFailure
from nano_shared.types import Limits

BOM, CAFE = b"\xef\xbb\xbf", "café".encode("latin-1")
Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def context() -> Iterator[ToolContext]:
    with closing(open_sandbox().open(None, Limits())) as jail:
        yield ToolContext(jail=jail, limits=Limits())


@pytest.fixture
def change(context: ToolContext) -> Callable[..., bytes]:
    """The bytes of a file `f` after a tool had it."""

    def changed(before: bytes, tool: str, **arguments: object) -> bytes:
        context.jail.write("f", before)
        TOOLS[tool](context, arguments if tool == "apply_patch" else {"path": "f", **arguments})
        return context.jail.read("f")

    return changed


def patch(*lines: str) -> dict[str, object]:
    return {"patch": "\n".join(["*** Begin Patch", "*** Update File: f", "@@", *lines, "*** End Patch"])}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("edit_file", {"line": 1, "new": "ONE"}),
        ("edit_file", {"old": "one\ntwo", "new": "ONE\ntwo"}),
        ("edit_file", {"old": "\ufeffone", "new": "\ufeffONE"}),
        ("apply_patch", patch("-one", "+ONE", " two")),
        ("apply_patch", patch("-\ufeffone", "+ONE", " two")),
        ("write_file", {"content": "ONE\ntwo\nlast\n"}),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_mark_and_line_ends_are_no_part_of_a_comparison_and_stay(
    tool: str, arguments: dict[str, object], end: bytes, change: Callable[..., bytes]
) -> None:
    before = BOM + end.join([b"one", b"two", b"last", b""])
    assert change(before, tool, **arguments) == before.replace(b"one", b"ONE")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("edit_file", {"old": "two\nthree", "new": "2\n3"}),
        ("apply_patch", patch("-two", "-three", "+2", "+3")),
    ],
)
def test_mixed_ends_and_a_missing_last_one_stay(
    tool: str, arguments: dict[str, object], change: Callable[..., bytes]
) -> None:
    before = b"one\r\ntwo\nthree\nfour\r\nlast"
    after = before.replace(b"two", b"2").replace(b"three", b"3")
    assert change(before, tool, **arguments) == after


@pytest.mark.parametrize(
    ("before", "new", "after"),
    [
        (b"1\n2", "3\n", b"1\n3"),
        (b"1\r\n2\r\n", "3\n4\n", b"1\r\n3\r\n4\r\n"),
        (b"1\r\n2", "3\n4", b"1\r\n3\r\n4"),
    ],
)
def test_a_replaced_line_ends_as_it_did(
    before: bytes, new: str, after: bytes, change: Callable[..., bytes]
) -> None:
    assert change(before, "edit_file", line=2, new=new) == after


@pytest.mark.parametrize(
    ("other", "letter"),
    [
        (CAFE + b" \xfcber\n", "ü"),
        (b"\x93quoted\x94 na\xefve\n", "ï"),
        ("déjà vu ça".encode() + b" \xff\n", "é"),
        ("日本語".encode("shift-jis") + b"\n", "x"),
    ],
    ids=["latin-1", "cp1252", "utf-8 with a byte that is none", "another"],
)
def test_bytes_that_are_no_utf_8_stay(other: bytes, letter: str, change: Callable[..., bytes]) -> None:
    before = b"one\n" + other + b"three\n"
    for tool, arguments in (
        ("edit_file", {"old": "three", "new": "3"}),
        ("edit_file", {"line": 3, "new": "3"}),
        ("apply_patch", patch("-three", "+3")),
    ):
        assert change(before, tool, **arguments) == b"one\n" + other + b"3\n"


def test_text_of_another_encoding_is_read_found_and_written_in_it(
    context: ToolContext, change: Callable[..., bytes]
) -> None:
    before = b"x = 1\ns = '" + CAFE + b"'\n"
    after = change(before, "edit_file", old="'café'", new="'cafés'")
    assert after == before.replace(CAFE, CAFE + b"s")
    assert TOOLS["read_file"](context, {"path": "f"}).text == "1|x = 1\n2|s = 'cafés'"
    assert TOOLS["read"](context, {"path": "f"}).text == "1|x = 1\n2|s = 'cafés'"
    assert TOOLS["search"](context, {"pattern": "café", "path": "f"}).text == "f:2:s = 'cafés'"
    assert "cafés" in TOOLS["grep"](context, {"pattern": "s = "}).text
    with pytest.raises(ToolFailure, match="latin-1 text, which has no '…'"):
        change(before, "edit_file", line=1, new="…")
    assert context.jail.read("f") == before


def test_a_mark_is_not_shown_and_hides_no_first_line(context: ToolContext) -> None:
    context.jail.write("f", BOM + b"one\n")
    assert {TOOLS[name](context, {"path": "f"}).text for name in ("read", "read_file")} == {"1|one"}
    for name in ("search", "grep"):
        assert TOOLS[name](context, {"pattern": "^one", "path": "f"}).text == "f:1:one"


@pytest.mark.parametrize("data", [b"\0\1", "text".encode("utf-16")])
def test_what_is_no_text_is_refused_and_left(
    data: bytes, change: Callable[..., bytes], context: ToolContext
) -> None:
    for tool, arguments in (
        ("edit_file", {"line": 1, "new": "x"}), ("apply_patch", patch("-a", "+b")), ("read_file", {}),
        ("read", {}),
    ):  # fmt: skip
        with pytest.raises(ToolFailure, match="f is no"):
            change(data, tool, **arguments)
    assert context.jail.read("f") == data
