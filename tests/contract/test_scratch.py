"""A scratch folder is gone when its owner is done with it, and soon after its owner was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_shared.files import ScratchFolder, scratch_folder, sweep_scratch

_OWNER = """
import sys
from nano_shared.files import ScratchFolder
folder = ScratchFolder("owned", sys.argv[1])
(folder.path / "deep").mkdir()
(folder.path / "deep" / "file").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""
_MAKER = """
import sys
from nano_shared.files import scratch_folder, sweep_scratch
for _ in range(200):
    with scratch_folder("busy", sys.argv[1]) as folder:
        (folder / "mine").write_text("x")
        sweep_scratch(sys.argv[1])
        assert (folder / "mine").read_text() == "x"
"""


def start(code: str, parent: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with scratch_folder("short", str(tmp_path)) as folder:
        (folder / "file").write_text("x")
    assert os.listdir(tmp_path) == []


def test_it_is_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch_folder("short", str(tmp_path)):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_what_a_program_closed_to_its_owner_is_removed_too(tmp_path: Path) -> None:
    with scratch_folder("closed", str(tmp_path)) as folder:
        (folder / "a" / "b" / "c").mkdir(parents=True)
        (folder / "a" / "b" / "file").write_text("x")
        (folder / "a" / "b" / "c").chmod(0)
        (folder / "a" / "b").chmod(0o500)
        (folder / "a").chmod(0)
    assert os.listdir(tmp_path) == []


def test_removing_it_twice_is_fine(tmp_path: Path) -> None:
    folder = ScratchFolder("twice", str(tmp_path))
    folder.remove()
    folder.remove()


def test_a_living_owner_keeps_it_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with start(_OWNER, tmp_path) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        sweep_scratch(str(tmp_path))
        assert (path / "deep" / "file").read_text() == "x"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert path.exists()
    sweep_scratch(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with start(_OWNER, tmp_path) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        owner.kill()
    with start(_OWNER, tmp_path) as next_owner:
        next_owner.communicate("")
    assert not left.exists()


def test_a_fork_of_the_owner_does_not_remove_it(tmp_path: Path) -> None:
    folder = ScratchFolder("forked", str(tmp_path))
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert folder.path.exists()
    folder.remove()
    assert os.listdir(tmp_path) == []


def test_makers_and_sweepers_at_once_take_nothing_from_each_other(tmp_path: Path) -> None:
    def make(_: int) -> int:
        with start(_MAKER, tmp_path) as maker:
            maker.communicate()
        return maker.returncode

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(make, range(6))) == [0] * 6
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "nano-other").mkdir()
    (tmp_path / "nano-scratch-file").write_text("a file, not a folder")
    (tmp_path / "nano-scratch-link").symlink_to(tmp_path / "nano-other")
    sweep_scratch(str(tmp_path))
    assert len(os.listdir(tmp_path)) == 3
