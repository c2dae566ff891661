"""Paths that cannot be read as they are: kept by their owner, or named, and the rest is kept."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from executions import a_runtime, a_task, act

from nano_coder.agent.actions import Workspace
from nano_coder.agent.profiles import find_profile
from nano_coder.run.execution import run_task
from nano_coder.sandbox.jail_request import pack_workspace
from nano_coder.sandbox.launcher import files
from nano_coder.sandbox.launcher.kernel import as_file_user
from nano_coder.sandbox.protocol import SupportsKeeping, open_sandbox
from nano_containers.folder_jail import NoSandbox
from nano_shared import snapshot, snapshot_change
from nano_shared.snapshot import BlobStore, Snapshot
from nano_shared.types import Limits, StopReason

NOBODY = 65534
DAY = find_profile("workday-1-hermes-json")
LOCKED_PATHS = ("cache", "secret")
LOCKED = """
import os
for mode in (0, 0o200, 0o300, 0o400, 0o600):
    os.makedirs(f"d{mode:o}/inner")
    open(f"d{mode:o}/inner/f", "w").write("x")
    open(f"f{mode:o}", "w").write("y")
    os.chmod(f"f{mode:o}", mode)
    os.chmod(f"d{mode:o}/inner", mode)
    os.chmod(f"d{mode:o}", mode)
"""


@pytest.mark.parametrize("kind", ["request", "kept", "no isolation"])
def test_what_the_owner_locked_is_kept_with_its_modes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_ALLOW_NO_SANDBOX", "1")
    blobs = BlobStore(tmp_path / "blobs")
    empty = snapshot.snapshot_texts({}, blobs)
    sandbox = NoSandbox() if kind == "no isolation" else open_sandbox()
    with closing(sandbox.open(None, Limits())) as jail:
        if kind == "kept":
            assert isinstance(jail, SupportsKeeping)
            assert jail.keep()
        workspace = Workspace(jail, blobs, start=empty, snapshot=empty)
        assert jail.run_python(LOCKED).ok
        workspace.refresh()
        first = workspace.snapshot
        assert workspace.refresh() == ()
    kept = snapshot.load(first, blobs).by_path
    for mode in (0, 0o200, 0o300, 0o400, 0o600):
        assert kept[f"f{mode:o}"].mode == kept[f"d{mode:o}"].mode == kept[f"d{mode:o}/inner"].mode == mode
        assert blobs.get(str(kept[f"d{mode:o}/inner/f"].content)) == b"x"
    assert workspace.left_out == ()


def test_a_run_names_what_it_cannot_keep_once_and_keeps_the_rest(tmp_path: Path) -> None:
    make = "mkfifo p; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'"
    texts = [
        act("bash", DAY, command=f"echo 1 > a; chmod 000 a; {make}; mv old gone; echo 41 passed"),
        act("bash", DAY, command="echo 2 > b; rm gone; mkfifo gone"),
        act("submit", DAY),
    ]
    runtime = a_runtime(tmp_path, texts, profile=DAY)
    run = run_task(a_task(files={"old": "x\n"}), runtime)
    first, second = (turn.observations[0] for turn in run.turns[:2])
    assert first.text.startswith("41 passed\n[in no diff")
    assert "'p', 's'" in first.text
    assert "'gone'" in second.text
    assert "'p'" not in second.text
    assert run.stop is StopReason.FINISHED
    assert set(first.files_changed) == {"a", "gone", "old"}
    assert set(second.files_changed) == {"b", "gone"}


@pytest.fixture
def ordinary(tmp_path: Path) -> Iterator[Path]:
    """A folder of an ordinary user, in whose name files are accessed meanwhile."""
    folder = tmp_path / "own"
    folder.mkdir()
    if os.geteuid() != 0:
        yield folder
        return
    for place in (tmp_path, *tmp_path.parents):
        place.chmod(place.stat().st_mode | 0o011)
    os.chown(folder, NOBODY, NOBODY)
    with as_file_user(NOBODY, NOBODY):
        yield folder


def test_locked_files_are_applied_and_undone_by_their_owner(ordinary: Path) -> None:
    blobs, here = BlobStore(ordinary / "blobs"), ordinary / "here"
    before = snapshot.snapshot_texts({"a": "1"}, blobs)
    after = snapshot.load(snapshot.snapshot_texts({"a": "1", "cache/f": "x", "secret": "s"}, blobs), blobs)
    locked = tuple(replace(entry, mode=0) if entry.path in LOCKED_PATHS else entry for entry in after.entries)
    snapshot.materialise(before, blobs, here)
    assert snapshot_change.apply(before, Snapshot(locked), blobs, here) == ["cache/f", "secret"]
    assert [(here / name).lstat().st_mode & 0o777 for name in LOCKED_PATHS] == [0, 0]
    assert snapshot_change.apply(before, Snapshot(locked), blobs, here) == []
    assert snapshot_change.undo([Snapshot(locked)], before, blobs, here) == ["cache/f", "secret"]
    assert os.listdir(here) == ["a"]


def test_what_nobody_may_read_of_a_project_is_left_out_and_left_alone(
    ordinary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs, work, unread = BlobStore(ordinary / "blobs"), ordinary / "work", list[str]()
    (work / "closed").mkdir(parents=True)
    for name in ("a", "locked", "closed/f"):
        (work / name).write_text("x")
    (work / "locked").chmod(0)
    (work / "closed").chmod(0o600)
    taken = snapshot.snapshot_directory(work, blobs, unread=unread.append)
    with pack_workspace(work).stream as stream:
        packed = snapshot.snapshot_tar(stream.read(), blobs)
    assert sorted(unread) == ["closed", "locked"]
    assert "you may not read 'closed', 'locked'" in capsys.readouterr().err
    assert packed == taken
    assert [entry.path for entry in snapshot.load(taken, blobs).entries] == ["a", "closed"]
    assert (work / "locked").lstat().st_mode & 0o777 == 0
    (work / "closed").chmod(0o700)


def test_a_path_that_cannot_be_read_any_more_is_as_it_was(tmp_path: Path) -> None:
    blobs, out = BlobStore(tmp_path / "blobs"), io.BytesIO()
    before = snapshot.load(snapshot.snapshot_texts({"a": "1", "d/f": "2", "d/g": "3"}, blobs), blobs)
    for name, kind in (("a", files.PIPE), ("d", files.DIRECTORY), ("d", files.UNREAD)):
        files.write_member(out, files.TarMember(name, kind, 0o755))
    files.write_end(out)
    named: list[str] = []
    after = snapshot.snapshot_tar(out.getvalue(), blobs, before=before, left_out=named.append)
    assert snapshot.changed_paths(before, snapshot.load(after, blobs)) == ("a",)
    assert named == ["a", "d"]
