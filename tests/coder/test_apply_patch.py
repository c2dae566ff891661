"""`apply_patch`: the format as Codex describes it, all or nothing, with errors that say where and what."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.apply_patch import PatchError, patched, read_patch
from nano_coder.tools.tool import TOOLS, ToolContext, ToolFailure, ToolResult
from nano_shared.types import Limits

SCENARIOS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "patch_scenarios.json").read_text(encoding="utf-8")
)
Apply = Callable[[str], ToolResult]


@pytest.fixture(scope="module")
def context() -> Iterator[ToolContext]:
    limits = Limits(memory_mb=256, tool_seconds=20)
    with closing(open_sandbox().open(None, limits)) as jail:
        yield ToolContext(jail=jail, limits=limits)


@pytest.fixture
def clean(context: ToolContext) -> ToolContext:
    context.jail.run(["sh", "-c", "rm -rf /work/* /work/.??*"])
    return context


@pytest.fixture
def apply(clean: ToolContext) -> Apply:
    return lambda patch: TOOLS["apply_patch"](clean, {"patch": patch})


def lay(context: ToolContext, files: dict[str, str]) -> None:
    for name, text in files.items():
        context.jail.write(name, text.encode())


def files(context: ToolContext) -> dict[str, str]:
    """Every file of the workspace; folders that hold none are named with a slash."""
    program = (
        "import os, json\nfound = {}\n"
        "for top, folders, names in os.walk('.'):\n"
        "    for name in names:\n"
        "        path = os.path.normpath(os.path.join(top, name))\n"
        "        found[path] = open(path, newline='', errors='surrogateescape').read()\n"
        "    if top != '.' and not folders and not names: found[os.path.normpath(top) + '/'] = ''\n"
        "print(json.dumps(found))"
    )
    return dict(json.loads(context.jail.run_python(program).stdout))


def update(hunks: str, path: str = "a.py") -> str:
    return f"*** Begin Patch\n*** Update File: {path}\n{hunks}*** End Patch\n"


def edited(text: str, hunks: str) -> str:
    return patched("a.py", text, read_patch(update(hunks))[0].hunks)[0]


def overlooked(text: str, hunks: str) -> tuple[str, ...]:
    return patched("a.py", text, read_patch(update(hunks))[0].hunks)[1]


def failure(apply: Apply, patch: str) -> str:
    with pytest.raises(ToolFailure) as raised:
        apply(patch)
    return str(raised.value)


# ------------------------------------------------------------------------------------- the scenarios


def test_there_are_the_scenarios_of_the_format() -> None:
    assert len({one["name"] for one in SCENARIOS}) == len(SCENARIOS) == 22


@pytest.mark.some(8)
@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: str(one["name"]))
def test_a_scenario_leaves_what_the_format_says(
    one: dict[str, Any], clean: ToolContext, apply: Apply
) -> None:
    lay(clean, one["before"])
    if one["fails"]:
        said = failure(apply, one["patch"])
        assert one["fails"] in said
        assert said.endswith("Nothing was changed.")
    else:
        assert apply(one["patch"]).ok
    assert files(clean) == one["after"]


# ------------------------------------------------------------------------------------------ matching


def test_several_headers_narrow_down() -> None:
    text = "class A:\n    def f(self):\n        x = 1\n\nclass B:\n    def f(self):\n        x = 1\n"
    hunks = "@@ class B:\n@@     def f(self):\n-        x = 1\n+        x = 2\n"
    assert edited(text, hunks) == text[:-2] + "2\n"


def test_a_hunk_of_additions_comes_below_its_header_else_at_the_end() -> None:
    assert edited("def f():\n    pass\nend\n", "@@ def f():\n+    x = 1\n") == (
        "def f():\n    x = 1\n    pass\nend\n"
    )
    assert edited("a\nb", "@@\n+c\n") == "a\nb\nc\n"


def test_the_end_of_a_file_is_sought_from_the_end() -> None:
    assert edited("x\ny\nx\n", "@@\n-x\n+z\n*** End of File\n") == "x\ny\nz\n"
    with pytest.raises(PatchError, match=r"its lines are lines 1 to 1, not the last ones"):
        edited("x\ny\n", "@@\n-x\n+z\n*** End of File\n")


@pytest.mark.parametrize(
    ("text", "wanted", "name"),
    [
        ("a = 1\n", "a = 1", ()),
        ("a = 1  \t\n", "a = 1", ("trailing blanks",)),
        ("    a = 1\n", "a = 1  ", ("blanks at both ends",)),
        ("say(\u201chi\u201d) \u2013 x\u00a0y\n", 'say("hi") - x y', ("typographic punctuation",)),
    ],
)
def test_what_a_match_overlooked_is_told_and_lines_that_stay_are_the_files_own(
    text: str, wanted: str, name: tuple[str, ...]
) -> None:
    hunks = f"@@\n {wanted}\n+b\n"
    assert edited(text, hunks) == text + "b\n"
    assert overlooked(text, hunks) == name


def test_a_stricter_match_further_down_wins_over_a_looser_one_above() -> None:
    assert edited(" x\nx\n", "@@\n-x\n+y\n") == " x\ny\n"


def test_an_empty_last_line_of_a_hunk_may_stand_for_the_end_of_the_file() -> None:
    assert edited("a\nb\n", "@@\n a\n-b\n+c\n\n") == "a\nc\n"
    assert overlooked("a\nb\n", "@@\n a\n-b\n+c\n\n") == ("an empty last line",)


@pytest.mark.parametrize("end", ["", "+\n"])
def test_lines_behind_such_an_empty_line_come_after_it(end: str) -> None:
    assert edited("a\n", f"@@\n a\n \n+b\n{end}") == "a\n\nb\n"


def test_line_ends_are_kept() -> None:
    crlf = "one\r\ntwo\r\nthree\r\n"
    assert edited(crlf, "@@\n one\n-two\n+2\n+2b\n three\n") == "one\r\n2\r\n2b\r\nthree\r\n"
    assert overlooked(crlf, "@@\n-two\n+2\n") == ()
    assert edited(crlf, "@@\r\n-two\r\n+2\r\n") == "one\r\n2\r\nthree\r\n"
    assert edited(crlf, "@@\n+four\n") == crlf + "four\r\n"
    assert edited("one\r\ntwo\nthree\n", "@@\n-two\n+2\n") == "one\r\n2\nthree\n"
    assert edited("one\r\ntwo\nthree\n", "@@\n-one\n+1\n") == "1\r\ntwo\nthree\n"


def test_blank_lines_at_the_end_of_a_file_stay() -> None:
    assert edited("a\n\n\n", "@@\n-a\n+b\n") == "b\n\n\n"
    assert edited("a\n", "@@\n-a\n") == ""


# -------------------------------------------------------------------------------------------- errors


def test_an_error_names_the_first_line_that_differs() -> None:
    text = "".join(f"line {n}\n" for n in range(1, 30))
    with pytest.raises(PatchError) as raised:
        edited(text, "@@\n line 11\n line 12\n-line thirteen\n+x\n line 14\n")
    assert str(raised.value) == (
        "a.py: the hunk at line 3 of the patch does not fit: expected 'line thirteen', and line 13 is"
        " 'line 13' (nearest place: from line 11 on, 3 of 4 lines alike)"
    )


def test_an_error_says_that_hunks_are_out_of_order_and_that_a_header_is_not_there() -> None:
    with pytest.raises(PatchError, match=r"below line 2: its lines are lines 1 to 1; hunks go from top"):
        edited("a\nb\n", "@@\n-b\n+c\n@@\n-a\n+d\n")
    with pytest.raises(PatchError) as raised:
        edited("def first():\n    pass\n", "@@ def frst():\n-    pass\n+    x\n")
    assert "the header 'def frst():' of line 3" in str(raised.value)
    assert str(raised.value).endswith("nearest is line 1: 'def first():'")
    with pytest.raises(PatchError, match="line 2 is the end of the file"):
        edited("a\n", "@@\n a\n-b\n")


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("", "the first line of a patch is '*** Begin Patch', not ''"),
        ("*** Begin Patch\n*** Add File: a\n+x\n", "the last line of a patch is '*** End Patch', not '+x'"),
        ("*** Begin Patch", "the last line of a patch"),
        ("*** Begin Patch\n+x\n*** End Patch", "line 2 of the patch: '+x' is no header"),
        (update("@@\n"), "line 4 of the patch: the end of the patch: a line of a hunk begins with"),
        (update("@@\n a\n*** End of File\nb\n"), "line 6 of the patch: a hunk begins with @@, not with 'b'"),
        (update("@@\n-a\nb\n"), "line 5 of the patch: a hunk begins with @@, not with 'b'"),
        (update(""), "line 2 of the patch: the update of a.py holds no hunk"),
    ],
)
def test_a_patch_that_cannot_be_read_is_told_by_its_line(apply: Apply, patch: str, said: str) -> None:
    assert said in failure(apply, patch)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../a", "a/../../b", ".git/config", "sub/.git/hooks/x", ".", "a/", "./"]
)
@pytest.mark.parametrize("kind", ["Add", "Update", "Delete", "Move"])
def test_a_path_that_no_patch_may_touch_is_refused(
    apply: Apply, clean: ToolContext, path: str, kind: str
) -> None:
    lay(clean, {"a.py": "x\n"})
    body = {
        "Add": f"*** Add File: {path}\n+x\n",
        "Update": f"*** Update File: {path}\n@@\n+x\n",
        "Delete": f"*** Delete File: {path}\n",
        "Move": f"*** Update File: a.py\n*** Move to: {path}\n@@\n+x\n",
    }[kind]
    said = failure(apply, f"*** Begin Patch\n*** Add File: new\n+x\n{body}*** End Patch")
    assert said.startswith(repr(path))
    assert files(clean) == {"a.py": "x\n"}


def test_links_are_not_followed(apply: Apply, clean: ToolContext) -> None:
    lay(clean, {"real/a.py": "x\n"})
    clean.jail.run(["sh", "-c", "ln -s real in; ln -s /etc out; ln -s real/a.py a.py; ln -s gone dead"])
    for path in ("a.py", "in/a.py", "in/new.py", "dead"):
        said = failure(apply, f"*** Begin Patch\n*** Add File: {path}\n+y\n*** End Patch")
        assert "is a link; patch what it leads to" in said
    assert "is a link" in failure(apply, "*** Begin Patch\n*** Add File: out/x\n+y\n*** End Patch")
    assert "is a link" in failure(apply, "*** Begin Patch\n*** Delete File: a.py\n*** End Patch")
    assert clean.jail.read("real/a.py") == b"x\n"


# ------------------------------------------------------------------------------------ all or nothing


def test_a_patch_that_fails_at_its_end_changes_nothing(apply: Apply, clean: ToolContext) -> None:
    before = {"a.py": "x\n", "locked/b.py": "y\n"}
    lay(clean, before)
    clean.jail.run(["chmod", "555", "locked"])
    patch = (
        "*** Begin Patch\n*** Update File: a.py\n@@\n-x\n+z\n*** Add File: new/deep/c.py\n+c\n"
        "*** Delete File: locked/b.py\n*** End Patch"
    )
    assert failure(apply, patch).endswith("Permission denied. Nothing was changed.")
    assert files(clean) == before
    clean.jail.run(["chmod", "755", "locked"])
    assert apply(patch).text == "M a.py\nA new/deep/c.py\nD locked/b.py"
    assert files(clean) == {"a.py": "z\n", "new/deep/c.py": "c\n", "locked/": ""}


def test_changes_of_one_patch_build_on_each_other(apply: Apply, clean: ToolContext) -> None:
    lay(clean, {"a.py": "x\n"})
    clean.jail.run(["chmod", "755", "a.py"])
    said = apply(
        "*** Begin Patch\n*** Update File: a.py\n*** Move to: b.py\n@@\n-x\n+y\n*** Update File: b.py\n@@\n"
        "-y\n+z\n*** Add File: c.py\n+c\n*** Delete File: c.py\n*** End Patch"
    )
    assert said.text == "D a.py\nM b.py\nD c.py"
    assert files(clean) == {"b.py": "z\n"}
    assert clean.jail.run(["stat", "-c", "%a", "b.py"]).stdout == b"755\n"
    assert "was deleted or moved by this patch" in failure(
        apply, "*** Begin Patch\n*** Delete File: b.py\n*** Update File: b.py\n@@\n-z\n*** End Patch"
    )


def test_tolerances_are_facts_of_the_result(apply: Apply, clean: ToolContext) -> None:
    lay(clean, {"a.py": "x  \n"})
    done = apply(update("@@\n-x\n+y\n"))
    assert done.repairs == ("trailing blanks",)
    assert done.text == "M a.py\nmatched by overlooking trailing blanks"


def test_a_patch_may_be_large(apply: Apply, clean: ToolContext) -> None:
    body = "".join(f"+line {n}\n" for n in range(40_000))
    apply(f"*** Begin Patch\n*** Add File: big\n{body}*** End Patch")
    assert clean.jail.read("big").count(b"\n") == 40_000


# ----------------------------------------------------------------- random patches, against an oracle

_WORDS = st.sampled_from(
    ["", "a", "b", "    a", "x = 1", "}", "\tpass", "é — “q”", "*** x", "@@", "+1", "-1"]
)


@st.composite
def _edits(draw: st.DrawFn) -> tuple[str, str, str]:
    """A text, a patch that was written from known edits, and the text that these edits make of it.

    The oracle cuts and joins lists by number; it knows nothing of searching. A hunk repeats as many lines
    from below the hunk before it as it takes for its first exact occurrence to be the right one.
    """
    old = draw(st.lists(_WORDS, min_size=1, max_size=25))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    cuts = sorted(draw(st.sets(st.integers(0, len(old)), min_size=2, max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    new, body, done = [], "", 0
    for start, stop in spans:
        come = draw(st.lists(_WORDS, max_size=4))
        before = draw(st.integers(0, start - done))
        after = draw(
            st.integers(0, min(3, (cuts[cuts.index(stop) + 1] if stop != cuts[-1] else len(old)) - stop))
        )
        while _first(old, old[start - before : stop + after], done) != start - before:
            before += 1
        body += "@@\n" + "".join(f" {line}\n" for line in old[start - before : start])
        body += "".join(f"-{line}\n" for line in old[start:stop])
        body += "".join(f"+{line}\n" for line in come)
        body += "".join(f" {line}\n" for line in old[stop : stop + after])
        new += [*old[done:start], *come, *old[stop : stop + after]]
        done = stop + after
    new += old[done:]
    text = end.join(old) + (end if old[-1] == "" or draw(st.booleans()) else "")
    end = end if end in text else "\n"
    wanted = "".join(line + end for line in new)
    open_ended = not text.endswith("\n") and spans[-1][1] < len(old)  # its last line is not touched
    return text, update(body), wanted.removesuffix(end) if open_ended else wanted


def _first(lines: list[str], wanted: list[str], start: int) -> int | None:
    spots = range(start, len(lines) - len(wanted) + 1)
    return next((at for at in spots if lines[at : at + len(wanted)] == wanted), None)


@settings(max_examples=300, deadline=None)
@given(_edits())
def test_random_patches_do_what_their_edits_did(case: tuple[str, str, str]) -> None:
    text, patch, wanted = case
    assert patched("a.py", text, read_patch(patch)[0].hunks) == (wanted, ())


@settings(max_examples=300, deadline=None)
@given(_edits(), st.randoms(use_true_random=False))
def test_blanks_at_the_ends_of_lines_cost_no_match_and_no_line_that_stays(case: Any, random: Any) -> None:
    text, patch, _ = case
    blanks = [
        line + random.choice(["", " ", "\t"]) if line[:1] in " -" else line for line in patch.split("\n")
    ]
    hunks = read_patch("\n".join(blanks))[0].hunks
    loose, _ = patched("a.py", text, hunks)
    kept = [line for line in text.replace("\r", "").split("\n") if line]
    assert set(loose.replace("\r", "").split("\n")) <= {*kept, "", *(h.text for k in hunks for h in k.lines)}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200), st.text(alphabet="*@+- \nabEndUpdateFil:", max_size=200))
def test_any_text_is_a_patch_or_a_sentence(text: str, body: str) -> None:
    for patch in (text, body, f"*** Begin Patch\n{body}\n*** End Patch", update(body + "\n")):
        with contextlib.suppress(PatchError):
            for change in read_patch(patch):
                patched("a", text, change.hunks)


# ----------------------------------------------------------- a clumsy model, which has the error alone


def _mended(patch: str, said: str) -> str | None:
    """The patch as a model mends it that knows no more than the error; None where the error does not help."""
    told = re.search(r"expected ('.*?'|\".*?\"), and line \d+ is ('.*'|\".*\")(?: \(nearest.*\))?$", said)
    if told is None:
        return None
    wrong, right = ast.literal_eval(told[1]), ast.literal_eval(told[2])
    lines = patch.split("\n")
    place = next((n for n, line in enumerate(lines) if line[:1] in " -" and line[1:] == wrong), None)
    if place is None:
        return None
    lines[place] = lines[place][:1] + right
    return "\n".join(lines)


def test_nine_of_ten_clumsy_patches_are_mended_by_what_their_error_says() -> None:
    random = Random(7)
    text = Path(TOOLS["apply_patch"].function.__code__.co_filename).read_text(encoding="utf-8")
    lines = text.split("\n")
    mended = 0
    for _ in range(200):
        at = random.randrange(3, len(lines) - 6)
        old = lines[at : at + 5]
        body = [f" {old[0]}", f" {old[1]}", f"-{old[2]}", "+    changed = True", f" {old[3]}", f" {old[4]}"]
        right = "@@\n" + "\n".join(body) + "\n"
        slip = random.choice(
            [n for n, line in enumerate(body) if line[0] in " -" and line[1:].strip()] or [0]
        )
        body[slip] = random.choice([f"{body[slip]} # as I recall it", body[slip][:1] + "remembered wrongly"])
        with pytest.raises(PatchError) as raised:
            edited(text, "@@\n" + "\n".join(body) + "\n")
        again = _mended("@@\n" + "\n".join(body) + "\n", str(raised.value))
        with contextlib.suppress(PatchError):
            mended += again is not None and edited(text, again) == edited(text, right)
    assert mended >= 180
