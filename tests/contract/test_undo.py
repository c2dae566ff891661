"""Undo: after apply and undo a tree is byte for byte what it was, whatever was done to it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from workspaces import read_tree, trees, write_tree

from nano_shared import snapshot, snapshot_change
from nano_shared.snapshot import BlobStore, differing_paths

# ------------------------------------------------------------------------------------ what an agent may do

_names = st.sampled_from([b"a", b"b", b"sub", b"n\xff"])
_paths = st.lists(_names, min_size=1, max_size=3).map(b"/".join)
_contents = st.sampled_from([b"", b"one\n", b"two\nlines\n", b"\0\xff binary", b"no end"])
_file_modes = st.sampled_from([0o644, 0o755, 0o600, 0o444])
_folder_modes = st.sampled_from([0o755, 0o700, 0o750])
_operations = st.one_of(
    st.tuples(st.just("write"), _paths, _contents, _file_modes),
    st.tuples(st.just("append"), _paths, _contents),
    st.tuples(st.just("delete"), _paths),
    st.tuples(st.just("rename"), _paths, _paths),
    st.tuples(st.just("chmod"), _paths, _file_modes),
    st.tuples(st.just("chmod folder"), _paths, _folder_modes),
    st.tuples(st.just("symlink"), _paths, st.sampled_from([b"a", b"../out", b"/nowhere", b"\xff"])),
    st.tuples(st.just("mkdir"), _paths),
    st.tuples(st.just("rmdir"), _paths),
)
turns = st.lists(st.lists(_operations, max_size=5), min_size=1, max_size=3)


def delete(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for child in os.listdir(path):
            delete(os.path.join(path, child))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.remove(path)


def passes_a_link(root: bytes, path: bytes) -> bool:
    parts = path.split(b"/")
    return any(os.path.islink(os.path.join(root, *parts[: n + 1])) for n in range(len(parts) - 1))


def operate(root: bytes, operation: tuple) -> None:
    """Do it, or nothing where the file system refuses. What stands in the way of a new thing makes way."""
    name, relative, *rest = operation
    path = os.path.join(root, relative)
    if passes_a_link(root, relative) or (name == "rename" and passes_a_link(root, rest[0])):
        return
    with suppress(OSError):
        match name:
            case "delete":
                delete(path)
            case "rename":
                os.rename(path, os.path.join(root, rest[0]))
            case "rmdir":
                os.rmdir(path)
            case "append" if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "ab") as file:
                    file.write(rest[0])
            case "chmod" if os.path.isfile(path) and not os.path.islink(path):
                os.chmod(path, rest[0])
            case "chmod folder" if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, rest[0])
            case "write" | "symlink" | "mkdir" if os.path.isdir(os.path.dirname(path)):
                delete(path)
                create(name, path, rest)


def create(name: str, path: bytes, rest: list) -> None:
    if name == "mkdir":
        os.mkdir(path)
    elif name == "symlink":
        os.symlink(rest[0], path)
    else:
        with open(path, "wb") as file:
            file.write(rest[0])
        os.chmod(path, rest[1])


@dataclass
class Run:
    """A directory as the run found it, and the snapshot and tree at its start and after each turn."""

    blobs: BlobStore
    here: Path
    snapshots: list[str]
    trees: list[dict]

    def apply(self) -> list[str]:
        return snapshot_change.apply(self.snapshots[0], self.snapshots[-1], self.blobs, self.here)

    def undo(self, to: int = 0) -> list[str]:
        stages = self.snapshots[:to:-1]
        return snapshot_change.undo(stages, self.snapshots[to], self.blobs, self.here)


@contextmanager
def a_run(tree: dict, turns: list[list[tuple]]) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blobs, here, there = BlobStore(folder / "blobs"), folder / "here", folder / "there"
        for directory in (here, there):
            directory.mkdir()
            write_tree(directory, tree)
        run = Run(blobs, here, [snapshot.snapshot_directory(there, blobs)], [tree])
        for turn in turns:
            for operation in turn:
                operate(os.fsencode(there), operation)
            run.snapshots.append(snapshot.snapshot_directory(there, blobs))
            run.trees.append(read_tree(there))
        yield run


# ------------------------------------------------------------------------------------ properties


@given(tree=trees, turns=turns, data=st.data())
@settings(max_examples=50, deadline=None)
def test_apply_then_undo_gives_the_tree_back(tree, turns, data):
    with a_run(tree, turns) as run:
        (run.here / ".git").mkdir()
        (run.here / ".git" / "HEAD").write_bytes(b"x")
        git = {b".git": ("dir", read_tree(run.here)[b".git"][1], (run.here / ".git").stat().st_mode & 0o777)}
        run.apply()
        assert read_tree(run.here) == run.trees[-1] | git
        middle = data.draw(st.integers(0, len(turns)), label="middle")
        run.undo(middle)
        assert read_tree(run.here) == run.trees[middle] | git
        assert run.undo(middle) == []
        run.undo()
        assert read_tree(run.here) == tree | git
        assert run.undo() == []


@pytest.mark.slow
@given(tree=trees, turns=turns, applied=st.booleans(), data=st.data())
@settings(max_examples=50, deadline=None)
def test_with_a_concurrent_edit_nothing_is_touched(tree, turns, applied, data):
    with a_run(tree, turns) as run:
        start, end = (snapshot.load(run.snapshots[n], run.blobs) for n in (0, -1))
        if applied:
            run.apply()
        paths = [p for p in differing_paths(start, end) if can_edit(run.here, p, start, end)]
        assume(paths)
        edited = data.draw(st.sampled_from(paths), label="edited")
        named = edit(run.here / edited)
        was = read_tree(run.here)
        with pytest.raises(snapshot.Conflict) as caught:
            run.undo() if applied else run.apply()
        assert os.path.relpath(named, run.here) in caught.value.paths
        assert read_tree(run.here) == was


def can_edit(here: Path, path: str, start: snapshot.Snapshot, end: snapshot.Snapshot) -> bool:
    """A file or link comes or goes there; where it is to come, a user can have put one of his own."""
    kinds = {entry.kind for entry in (start.by_path.get(path), end.by_path.get(path)) if entry}
    reachable = (here / path).parent.is_dir() and not passes_a_link(os.fsencode(here), os.fsencode(path))
    return bool(kinds - {snapshot.EntryKind.DIRECTORY}) and reachable


def edit(path: Path) -> Path:
    """Write a file there, or in the folder that is there; what the folder's mode is stays."""
    if path.is_dir() and not path.is_symlink():
        path = path / "mine"
    mode = path.parent.stat().st_mode
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)
    path.write_text("the user's own edit")
    path.parent.chmod(mode)
    return path


# ------------------------------------------------------------------------------------ by hand


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_a_directory_at_an_earlier_stage_is_taken_back_from_there():
    turns = [[("write", b"made", b"1", 0o644)], [("delete", b"made"), ("write", b"a", b"2", 0o644)]]
    with a_run({b"a": ("file", b"0", 0o644)}, turns) as run:
        snapshot_change.apply(run.snapshots[0], run.snapshots[1], run.blobs, run.here)
        assert run.undo() == ["made"]
        assert read_tree(run.here) == run.trees[0]


@pytest.mark.parametrize(
    "last", [("delete", b"sub"), ("chmod folder", b"sub", 0o700), ("write", b"sub", b"1", 0o644)]
)
@pytest.mark.parametrize("found", [{}, {b"sub": ("dir", {}, 0o750)}])
def test_an_empty_folder_of_an_earlier_stage_is_taken_back_from_there(found, last):
    first = [("mkdir", b"sub"), ("chmod folder", b"sub", 0o755)]
    with a_run(found, [first, [last]]) as run:
        run.apply()
        run.undo(1)
        assert read_tree(run.here) == run.trees[1]
        run.undo()
        assert read_tree(run.here) == found


def test_an_earlier_stage_does_not_excuse_an_edit():
    turns = [[("write", b"made", b"1", 0o644)], [("write", b"a", b"2", 0o644)]]
    with a_run({b"a": ("file", b"0", 0o644)}, turns) as run:
        run.apply()
        (run.here / "a").write_bytes(b"the user's own edit")
        with pytest.raises(snapshot.Conflict) as caught:
            run.undo()
        assert caught.value.paths == ("a",)
        assert (run.here / "made").read_bytes() == b"1"


def test_a_file_of_the_users_where_the_agent_once_had_one_stays():
    turns = [[("write", b"made", b"1", 0o644)], [("delete", b"made"), ("write", b"a", b"2", 0o644)]]
    with a_run({b"a": ("file", b"0", 0o644)}, turns) as run:
        run.apply()
        (run.here / "made").write_text("mine")
        assert run.undo() == ["a"]
        assert (run.here / "made").read_text() == "mine"


def test_a_folder_of_the_run_stays_where_the_user_put_something_in_it():
    with a_run({}, [[("mkdir", b"sub"), ("write", b"sub/a", b"1", 0o644)]]) as run:
        run.apply()
        (run.here / "sub" / "mine").write_text("mine")
        (run.here / "sub").chmod(0o750)
        run.undo()
        assert read_tree(run.here) == {
            b"sub": ("dir", {b"mine": read_tree(run.here / "sub")[b"mine"]}, 0o750)
        }


@pytest.mark.parametrize("excluded", [".venv", "__pycache__", ".git"])
def test_what_no_snapshot_holds_outlives_its_folder(excluded):
    tree = {b"sub": ("dir", {b"a": ("file", b"0", 0o644)}, 0o755)}
    with a_run(tree, [[("delete", b"sub")]]) as run:
        (run.here / "sub" / excluded).mkdir()
        (run.here / "sub" / excluded / "file").write_text("kept")
        was = read_tree(run.here)
        run.apply()
        assert not (run.here / "sub" / "a").exists()
        assert (run.here / "sub" / excluded / "file").read_text() == "kept"
        run.undo()
        assert read_tree(run.here) == was


def test_a_folder_with_excluded_files_deep_in_it_never_makes_way_for_a_file():
    inner = ("dir", {b"a": ("file", b"0", 0o644)}, 0o755)
    with a_run({b"sub": ("dir", {b"b": inner}, 0o755)}, [[("write", b"sub", b"1", 0o644)]]) as run:
        (run.here / "sub" / "b" / ".venv").mkdir()
        was = read_tree(run.here)
        with pytest.raises(snapshot.Conflict) as caught:
            run.apply()
        assert caught.value.paths == ("sub/b/.venv",)
        assert read_tree(run.here) == was


def test_special_bits_of_a_folder_are_the_users(work, blobs):
    (work / "shared").mkdir()
    (work / "shared").chmod(0o2750)
    before = snapshot.snapshot_directory(work, blobs)
    (work / "shared").chmod(0o2700)
    after = snapshot.snapshot_directory(work, blobs)
    snapshot_change.undo([after], before, blobs, work)
    assert (work / "shared").stat().st_mode & 0o7777 == 0o2750


class MeddledBlobs(BlobStore):
    """A store whose reader is so slow that the user saves a file meanwhile."""

    def __init__(self, folder: Path, edited: Path) -> None:
        super().__init__(folder)
        self._edited = edited

    def get(self, blob: str) -> bytes:
        data = super().get(blob)
        if not data.startswith(b"{"):
            self._edited.write_text("the user's own edit")
        return data


def test_an_edit_while_new_files_are_written_is_a_conflict(work, blobs, tmp_path):
    for name in ("a", "b"):
        (work / name).write_text("old")
    before = snapshot.snapshot_directory(work, blobs)
    for name in ("a", "b"):
        (work / name).write_text("new")
    after = snapshot.snapshot_directory(work, blobs)
    with pytest.raises(snapshot.Conflict) as caught:
        snapshot_change.undo([after], before, MeddledBlobs(tmp_path / "blobs", work / "b"), work)
    assert caught.value.paths == ("b",)
    assert (work / "a").read_text() == "new"
    assert sorted(os.listdir(work)) == ["a", "b"]
