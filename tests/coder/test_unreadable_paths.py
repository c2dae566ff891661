"""Paths that cannot be read as they are: kept by their owner, or named, while the rest of a workspace is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from executions import a_runtime, a_task, act

from nano_coder.agent.profiles import find_profile
from nano_coder.agent.workspace import Workspace
from nano_coder.run.execution import run_task
from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.protocol import SupportsKeeping
from nano_coder.sandbox.unisolated import NoSandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.types import Limits, StopReason

NOBODY = 65534
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
def test_what_the_owner_locked_is_kept_with_its_modes(kind: str, tmp_path: Path) -> None:
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
    make = "mkfifo p; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'; rm gone; echo 41 passed"
    texts = [
        act("bash", command="echo 1 > a; chmod 000 a; " + make.replace("rm gone", "mv old gone")),
        act("bash", command="echo 2 > b; rm gone; mkfifo gone"),
        act("submit"),
    ]
    runtime = a_runtime(tmp_path, texts, profile=find_profile("workday-1-hermes-json"))
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
def lent(tmp_path: Path) -> Path:
    """A folder that the user nobody owns, below folders that it may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "own").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "own", NOBODY, NOBODY)
    return tmp_path / "own"


def as_ordinary_user(source: str, folder: Path) -> str:
    """What Python prints as a user whom permissions bind."""
    preexec = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys\nsys.path[:] = " + repr(sys.path) + "\n" + source],
        cwd=folder, capture_output=True, text=True, check=False, **preexec,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


CHANGE = """
import json, os
from pathlib import Path
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
blobs, here, there = BlobStore(Path("blobs")), Path("here"), Path("there")
for folder in (here, there):
    folder.mkdir()
    (folder / "a").write_text("1")
(there / "cache").mkdir()
(there / "cache" / "f").write_text("x")
(there / "secret").write_text("s")
before = snapshot.snapshot_directory(here, blobs)
after = snapshot.snapshot_directory(there, blobs)
entries = {e.path: e for e in snapshot.load(after, blobs).entries}
import dataclasses
from nano_shared.snapshot.tree import make_snapshot
locked = make_snapshot(dataclasses.replace(e, mode=e.mode if e.path in ("a", "cache/f") else 0) for e in entries.values())
said = [snapshot.apply(before, locked, blobs, here)]
said.append([oct(os.lstat(f"here/{name}").st_mode & 0o777) for name in ("cache", "secret")])
said.append(snapshot.apply(before, locked, blobs, here))
said.append(snapshot.undo([locked], before, blobs, here))
said.append(sorted(os.listdir("here")))
print(json.dumps(said))
"""


def test_locked_files_are_applied_and_undone_by_their_owner(lent: Path) -> None:
    applied, modes, again, undone, left = json.loads(as_ordinary_user(CHANGE, lent))
    assert applied == undone == ["cache/f", "secret"]
    assert modes == ["0o0", "0o0"]
    assert again == []
    assert left == ["a"]


PROJECT = """
import json, os
from pathlib import Path
from nano_coder.sandbox.workspace_archive import pack_workspace
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
work = Path("work")
(work / "closed").mkdir(parents=True)
for name in ("a", "locked", "closed/f"):
    (work / name).write_text("x")
(work / "locked").chmod(0)
(work / "closed").chmod(0o600)
unread = []
taken = snapshot.snapshot_directory(work, BlobStore(Path("blobs")), unread=unread.append)
found = [e.path for e in snapshot.load(taken, BlobStore(Path("blobs"))).entries]
pack_workspace(work).stream.close()
print(json.dumps([sorted(unread), found, oct(os.lstat(work / "locked").st_mode & 0o777)]))
(work / "closed").chmod(0o700)
"""


def test_what_an_ordinary_user_cannot_read_of_a_project_is_left_out_and_left_alone(lent: Path) -> None:
    unread, found, mode = json.loads(as_ordinary_user(PROJECT, lent))
    assert (unread, found, mode) == (["closed", "locked"], ["a", "closed"], "0o0")
