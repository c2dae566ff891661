"""A change between two trees, in part, at its smallest, and made again by the tools."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nano_coder.tools.text_files import _replace_passage, replace_line
from nano_rl.tasks.code_places import applied, changed_places, edit_actions, hunks_between
from nano_shared.snapshot import MemoryBlobs, Snapshot, load, snapshot_texts

LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "    c\n", "d\r\n", "\fe\n"]), min_size=1, max_size=12)


def tree(blobs: MemoryBlobs, **texts: str) -> Snapshot:
    return load(snapshot_texts({f"{name}.py": text for name, text in texts.items()}, blobs), blobs)


def text_of(some: Snapshot, blobs: MemoryBlobs, path: str = "a.py") -> str:
    return blobs.get(str(some.by_path[path].content)).decode()


@given(LINES, LINES)
def test_a_change_is_made_again_by_its_hunks_and_by_the_tools(old: list[str], new: list[str]) -> None:
    blobs = MemoryBlobs()
    before, after = (tree(blobs, a="".join(lines)) for lines in (old, new))
    hunks = hunks_between(before, after, ["a.py"], blobs)
    assert text_of(applied(before, hunks, blobs), blobs) == "".join(new)
    assert applied(before, [], blobs) == before
    text = "".join(old)
    for action in edit_actions(before, hunks, blobs):
        match action.arguments:
            case {"line": int(line), "new": str(put)}:
                text = replace_line("a.py", text, line, put)
            case {"old": str(gone), "new": str(put)}:
                text = _replace_passage("a.py", text, gone, put)
    # an edit keeps the line ends of the lines that it replaces
    assert text.replace("\r", "") == "".join(new).replace("\r", "")


def test_files_that_come_and_go_are_written_and_removed() -> None:
    blobs = MemoryBlobs()
    before, after = tree(blobs, old="x = 1\n", kept="y = 1\n"), tree(blobs, new="x = 1\n", kept="y = 2\n")
    hunks = hunks_between(before, after, ["old.py", "new.py", "kept.py"], blobs)
    assert applied(before, hunks, blobs) == after
    assert [(a.name, a.arguments) for a in edit_actions(before, hunks, blobs)] == [
        ("read_file", {"path": "kept.py"}), ("edit_file", {"path": "kept.py", "line": 1, "new": "y = 2\n"}),
        ("write_file", {"path": "new.py", "content": "x = 1\n"}), ("shell", {"command": "rm old.py"}),
    ]  # fmt: skip
    assert changed_places(before, after, blobs) == ["kept.py", "new.py", "old.py"]


def test_the_places_of_a_change_are_its_functions() -> None:
    blobs = MemoryBlobs()
    method = "class A:\n    def f(self):\n        def g():\n            return 1\n        return g\n"
    old = f"import os\n\n\n{method}\n\ndef h():\n    return 2\n"
    new = (
        old.replace("return 1", "return 3")
        .replace("os", "sys")
        .replace("    return 2", "    x = 4\n    return x")
    )
    before, after = tree(blobs, a=old), tree(blobs, a=new)
    assert changed_places(before, after, blobs) == ["a.py", "a.py::A.f", "a.py::h"]
