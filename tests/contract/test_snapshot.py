"""Snapshots: exact, outside the user's git, and applied whole or not at all."""

import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workspaces import read_tree, trees, write_tree

from nano_shared import snapshot, snapshot_change
from nano_shared.errors import LogError, UsageError
from nano_shared.snapshot import BlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info


def packed(directory: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(directory, ".")
    return stream.getvalue()


# ------------------------------------------------------------------------------------ properties


@given(tree=trees)
@settings(max_examples=60, deadline=None)
def test_materialised_snapshot_has_the_same_id(tree):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blobs, here, there = BlobStore(folder / "blobs"), folder / "here", folder / "there"
        here.mkdir()
        write_tree(here, tree)
        taken = snapshot.snapshot_directory(here, blobs)
        snapshot.materialise(taken, blobs, there)
        assert read_tree(there) == tree
        assert snapshot.snapshot_directory(there, blobs) == taken
        assert snapshot.snapshot_tar(packed(there), blobs) == taken


NAMES = st.sampled_from(["a", "b/c", "b/d.py", "./e", "f//g", "é", ".git/config", "h.pyc"])


@given(texts=st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=20)))
@settings(max_examples=50, deadline=None)
def test_texts_are_the_files_that_they_name(texts):
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder) / "blobs")
        work = Path(folder) / "work"
        work.mkdir()
        for name, text in texts.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).parent.chmod(0o755)
            (work / name).write_bytes(text.encode())
            (work / name).chmod(0o644)
        assert snapshot.snapshot_texts(texts, blobs) == snapshot.snapshot_directory(work, blobs)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a": "", "a/b": ""}, "passes through 'a'"),
        ({"a": "\ud800"}, "'a' holds no text"),
        ({"n" * 300: ""}, "longer than a file system takes"),
        ({"../a": ""}, "leads outside"),
        ({"a/": ""}, "the name of a folder"),
        ({"a": "x" * 40}, "over the 0 MB"),
    ],
)
def test_texts_that_cannot_lie_in_a_folder(blobs, texts, message):
    with pytest.raises(snapshot.SnapshotError, match=message):
        snapshot.snapshot_texts(texts, blobs, max_bytes=30)


@given(before=trees, after=trees)
@settings(max_examples=60, deadline=None)
def test_apply_then_undo_restores_every_byte(before, after):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blobs, here, there = BlobStore(folder / "blobs"), folder / "here", folder / "there"
        for directory, tree in ((here, before), (there, after)):
            directory.mkdir()
            write_tree(directory, tree)
        old, new = (snapshot.snapshot_directory(directory, blobs) for directory in (here, there))
        changed = snapshot.changed_paths(snapshot.load(old, blobs), snapshot.load(new, blobs))
        assert bool(changed) == (before != after)
        assert tuple(snapshot_change.apply(old, new, blobs, here)) == changed
        assert read_tree(here) == after
        assert snapshot_change.apply(old, new, blobs, here) == []
        assert tuple(snapshot_change.apply(new, old, blobs, here)) == changed
        assert read_tree(here) == before


# ------------------------------------------------------------------------------------ taking


def test_version_control_and_caches_are_left_out(work, blobs):
    for name in (".git", "sub/.venv", "node_modules", "sub/__pycache__"):
        (work / name).mkdir(parents=True)
        (work / name / "file").write_text("x")
    (work / "sub" / "mod.pyc").write_text("x")
    (work / ".gitignore").write_text("x")
    for taken in (snapshot.snapshot_directory(work, blobs), snapshot.snapshot_tar(packed(work), blobs)):
        assert [entry.path for entry in snapshot.load(taken, blobs).entries] == [".gitignore", "sub"]
    everything = snapshot.load(snapshot.snapshot_directory(work, blobs, exclude=()), blobs)
    assert ".git/file" in everything.by_path


def test_setuid_is_not_kept(work, blobs):
    (work / "tool").write_text("x")
    (work / "tool").chmod(0o4755)
    taken = snapshot.load(snapshot.snapshot_directory(work, blobs), blobs)
    assert taken.by_path["tool"].mode == 0o755
    hostile = tar_of((member("tool", mode=0o6777), b"x"))
    assert snapshot.load(snapshot.snapshot_tar(hostile, blobs), blobs).by_path["tool"].mode == 0o777


def test_pipes_are_left_out(work, blobs):
    os.mkfifo(work / "pipe")
    assert snapshot.load(snapshot.snapshot_directory(work, blobs), blobs).entries == ()
    assert snapshot.load(snapshot.snapshot_tar(packed(work), blobs), blobs).entries == ()


def test_a_huge_directory_is_refused_with_its_largest_file(work, blobs):
    (work / "small").write_bytes(b"x" * 10)
    with (work / "data.bin").open("wb") as file:
        file.truncate(3 * 2**20)
    with pytest.raises(UsageError, match=r"3 MB, over the 2 MB.*largest: data\.bin, 3 MB.*smaller directory"):
        snapshot.snapshot_directory(work, blobs, max_bytes=2 * 2**20)
    with pytest.raises(UsageError, match=r"outgrew 2 MB at .\./data\.bin"):
        snapshot.snapshot_tar(packed(work), blobs, max_bytes=2 * 2**20)


def test_missing_directory(tmp_path, blobs):
    with pytest.raises(UsageError, match="no such directory"):
        snapshot.snapshot_directory(tmp_path / "nothing", blobs)


@pytest.mark.as_user
def test_unreadable_file_is_named(work, blobs):
    (work / "secret").touch(mode=0o000)
    with pytest.raises(UsageError, match=r"cannot read .*secret"):
        snapshot.snapshot_directory(work, blobs)


# ------------------------------------------------------------------------------------ hostile archives


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(member("/etc/cron.d/x"), b"x")], "leads outside"),
        ([(member("a/../../x"), b"x")], "leads outside"),
        ([(member("null", tarfile.CHRTYPE), b"")], "is a device"),
        ([(member("disk", tarfile.BLKTYPE), b"")], "is a device"),
        ([(member("h", tarfile.LNKTYPE, "/etc/shadow"), b"")], "leads outside"),
        ([(member("h", tarfile.LNKTYPE, "elsewhere"), b"")], "does not hold"),
        ([(member("l", tarfile.SYMTYPE, "/tmp"), b""), (member("l/x"), b"x")], "not a directory"),
        ([(member("f"), b"x"), (member("f/x"), b"x")], "not a directory"),
        ([(member("l", tarfile.SYMTYPE, ""), b"")], "has the target ''"),
        ([(member("n" * 300), b"x")], "longer than a file system takes"),
    ],
)
def test_hostile_archive_is_refused(blobs, members, message):
    with pytest.raises(UsageError, match=message):
        snapshot.snapshot_tar(tar_of(*members), blobs)


@pytest.mark.parametrize("stream", [b"not a tar" * 100, tar_of((member("a"), b"x" * 2000))[:1500]])
def test_damaged_archive_is_refused(blobs, stream):
    with pytest.raises(UsageError, match="damaged"):
        snapshot.snapshot_tar(stream, blobs)


def test_archive_that_claims_more_than_it_holds(blobs):
    info = member("big")
    info.size = 2**50
    with pytest.raises(UsageError, match="outgrew 512 MB at 'big'"):
        snapshot.snapshot_tar(info.tobuf(), blobs)


def test_hard_links_become_files(blobs, tmp_path):
    linked = tar_of((member("a", mode=0o600), b"x"), (member("b", tarfile.LNKTYPE, "a"), b""))
    taken = snapshot.load(snapshot.snapshot_tar(linked, blobs), blobs)
    assert taken.by_path["b"].content == taken.by_path["a"].content
    assert taken.by_path["b"].mode == 0o600


def test_the_last_of_two_members_counts(blobs):
    twice = snapshot.snapshot_tar(tar_of((member("./a"), b"one"), (member("a"), b"two")), blobs)
    [entry] = snapshot.load(twice, blobs).entries
    assert blobs.get(entry.content) == b"two"


def test_parents_that_an_archive_does_not_name_are_made(blobs):
    taken = snapshot.load(snapshot.snapshot_tar(tar_of((member("a/b/c"), b"x")), blobs), blobs)
    assert [(entry.path, entry.kind.value) for entry in taken.entries] == [
        ("a", "dir"),
        ("a/b", "dir"),
        ("a/b/c", "file"),
    ]


def test_a_blob_that_is_no_snapshot(blobs):
    for data in (b"{}", b"\xff", b'{"format": "nano-snapshot-1", "entries": [["../x", "file", 420, "b"]]}'):
        with pytest.raises(UsageError):
            snapshot.load(blobs.put(data), blobs)


def test_materialise_wants_an_empty_directory(work, blobs):
    taken = snapshot.snapshot_directory(work, blobs)
    (work / "mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        snapshot.materialise(taken, blobs, work)


# ------------------------------------------------------------------------------------ applying


@pytest.fixture
def change(work, blobs):
    """Snapshots before and after an edit of `a`, a new `sub/new` and the removal of `old`; work as before."""
    (work / "sub").mkdir()
    for name in ("a", "old", "sub/kept"):
        (work / name).write_text(name)
    before = snapshot.snapshot_directory(work, blobs)
    (work / "a").write_text("edited")
    (work / "sub" / "new").write_text("new")
    (work / "old").unlink()
    after = snapshot.snapshot_directory(work, blobs)
    snapshot_change.apply(after, before, blobs, work)
    return before, after


def test_only_differing_paths_are_touched(work, blobs, change):
    (work / "sub" / "kept").write_text("the user's own edit")
    (work / "mine").write_text("mine")
    kept = os.stat(work / "sub" / "kept").st_mtime_ns
    assert snapshot_change.apply(*change, blobs, work) == ["a", "old", "sub/new"]
    assert (work / "sub" / "kept").read_text() == "the user's own edit"
    assert os.stat(work / "sub" / "kept").st_mtime_ns == kept
    assert sorted(path.name for path in work.iterdir()) == ["a", "mine", "sub"]


def test_all_conflicts_are_listed_and_nothing_is_touched(work, blobs, change):
    (work / "a").write_text("the user's own edit")
    (work / "sub" / "new").write_text("the user's own file")
    was = read_tree(work)
    with pytest.raises(snapshot.Conflict, match="2 paths changed") as caught:
        snapshot_change.apply(*change, blobs, work)
    assert caught.value.paths == ("a", "sub/new")
    assert read_tree(work) == was


@pytest.mark.parametrize("spoil", ["mode", "gone", "link", "folder", "pipe"])
def test_every_kind_of_change_conflicts(work, blobs, change, spoil):
    path = work / "a"
    if spoil == "mode":
        path.chmod(0o755)
    else:
        path.unlink()
    if spoil == "link":
        path.symlink_to("old")
    if spoil == "folder":
        path.mkdir()
    if spoil == "pipe":
        os.mkfifo(path)
    with pytest.raises(snapshot.Conflict) as caught:
        snapshot_change.apply(*change, blobs, work)
    assert caught.value.paths == ("a",)
    assert (work / "old").exists()


def test_a_parent_that_became_a_symlink_leads_nowhere(tmp_path, work, blobs, change):
    outside = tmp_path / "outside"
    (work / "sub").rename(outside)
    (work / "sub").symlink_to(outside)
    with pytest.raises(snapshot.Conflict) as caught:
        snapshot_change.apply(*change, blobs, work)
    assert caught.value.paths == ("sub",)
    assert [path.name for path in outside.iterdir()] == ["kept"]


def test_a_new_folder_that_is_a_symlink_leads_nowhere(tmp_path, work, blobs):
    before = snapshot.snapshot_directory(work, blobs)
    (work / "made").mkdir()
    (work / "made" / "file").write_text("x")
    after = snapshot.snapshot_directory(work, blobs)
    snapshot_change.apply(after, before, blobs, work)
    (work / "made").symlink_to(tmp_path)
    with pytest.raises(snapshot.Conflict) as caught:
        snapshot_change.apply(before, after, blobs, work)
    assert caught.value.paths == ("made",)
    assert not (tmp_path / "file").exists()


def test_files_through_a_directory_that_the_user_made_too(work, blobs):
    before = snapshot.snapshot_directory(work, blobs)
    (work / "tests").mkdir()
    (work / "tests" / "test_new.py").write_text("x")
    after = snapshot.snapshot_directory(work, blobs)
    snapshot_change.apply(after, before, blobs, work)
    (work / "tests").mkdir()
    (work / "tests" / "mine.py").write_text("mine")
    assert snapshot_change.apply(before, after, blobs, work) == ["tests/test_new.py"]
    snapshot_change.apply(after, before, blobs, work)
    assert [path.name for path in (work / "tests").iterdir()] == ["mine.py"]


def test_a_directory_with_unknown_files_never_makes_way(work, blobs):
    (work / "x").mkdir()
    before = snapshot.snapshot_directory(work, blobs)
    (work / "x").rmdir()
    (work / "x").write_text("now a file")
    after = snapshot.snapshot_directory(work, blobs)
    snapshot_change.apply(after, before, blobs, work)
    (work / "x" / "mine").write_text("mine")
    with pytest.raises(snapshot.Conflict) as caught:
        snapshot_change.apply(before, after, blobs, work)
    assert caught.value.paths == ("x/mine",)
    assert (work / "x" / "mine").read_text() == "mine"


def test_read_only_directories_come_and_go(work, blobs):
    before = snapshot.snapshot_directory(work, blobs)
    (work / "sealed").mkdir()
    (work / "sealed" / "file").write_text("x")
    (work / "sealed").chmod(0o555)
    after = snapshot.snapshot_directory(work, blobs)
    snapshot_change.apply(after, before, blobs, work)
    assert read_tree(work) == {}
    snapshot_change.apply(before, after, blobs, work)
    assert snapshot.snapshot_directory(work, blobs) == after
    snapshot_change.apply(after, before, blobs, work)


@pytest.mark.as_user
def test_a_read_only_parent_is_refused_before_anything_changes(work, blobs, change):
    (work / "sub").chmod(0o755)
    was = read_tree(work)
    before, after = (snapshot.load(taken, blobs) for taken in change)
    (work / "sub").chmod(0o555)
    with pytest.raises(UsageError, match=r"cannot change 'sub/[^']*': Permission denied"):
        snapshot_change.apply(before, after, blobs, work)
    (work / "sub").chmod(0o755)
    assert read_tree(work) == was


def test_a_missing_blob_is_met_before_anything_changes(work, blobs, change):
    after = snapshot.load(change[1], blobs)
    blobs.path(after.by_path["sub/new"].content).unlink()
    was = read_tree(work)
    with pytest.raises(LogError, match="missing"):
        snapshot_change.apply(*change, blobs, work)
    assert read_tree(work) == was


def test_apply_wants_a_directory(tmp_path, blobs, change):
    with pytest.raises(UsageError, match="no such directory"):
        snapshot_change.apply(*change, blobs, tmp_path / "nothing")
