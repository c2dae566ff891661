"""Folders for what lies on the disk for a while: their owner removes them, or, where it was killed, the next
process that makes one.

An owner holds a lock on its folder, which the kernel lets go of when the last process that has it ends.
A folder with our prefix whose lock is free belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs


def nano_home() -> Path:
    """The data folder, absolute. It is not created here: whoever writes into it does that."""
    chosen = os.environ.get("NANO_HOME")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_data_path("nano")


PREFIX = "nano-scratch-"
_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30
"""free bytes there from which on it is used: four of the largest workspaces, or the log of 20,000 checks"""

_swept: set[tuple[int, str]] = set()
_lock = threading.Lock()


class ScratchFolder:
    """A folder of one's own under `parent`, by default the directory for temporary files."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """`kind` is part of its name, for who looks. Raises OSError where no folder can be made."""
        parent = parent or tempfile.gettempdir()
        _sweep_once(parent)
        self._owner = os.getpid()
        self.path, self._held = _made(kind, parent)

    def remove(self) -> None:
        """Remove it and what is in it; in a fork of its owner, nothing. Idempotent."""
        if self._held < 0 or os.getpid() != self._owner:
            return
        _remove(self.path)
        os.close(self._held)
        self._held = -1


@contextmanager
def scratch_folder(kind: str, parent: str | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = ScratchFolder(kind, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def in_memory() -> str | None:
    """A parent whose folders lie in memory, where there is one with room; otherwise None."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
            return str(_MEMORY)
    return None


def sweep(parent: str) -> None:
    """Remove the folders under `parent` whose owners are gone."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX):
            continue
        with suppress(OSError):
            held = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # what another user made is not ours to remove
                if os.geteuid() in (0, os.fstat(held).st_uid):
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(Path(entry.path))
            finally:
                os.close(held)


def _sweep_once(parent: str) -> None:
    with _lock:
        if (os.getpid(), parent) in _swept:
            return
        _swept.add((os.getpid(), parent))
    with suppress(OSError):
        sweep(parent)


def _made(kind: str, parent: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        # a sweep may come between making it and holding it: then there is another to make
        with suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(held), os.stat(path)):
                    return path, held
            except OSError:
                os.close(held)
                raise
            os.close(held)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path, onerror=_open_up)
    except RecursionError:  # a program nested its folders deeper than Python's stack is
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", os.fspath(path)], check=False, capture_output=True)


def _open_up(function: Callable[..., object], path: str, problem: object) -> None:
    """Try again with the rights that a program took from its own folders, where there are any to give."""
    with suppress(OSError):
        closed = [place for place in (os.path.dirname(path), path) if _closed(place)]
        for place in closed:
            os.chmod(place, 0o700)
        if closed and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, onerror=_open_up)
        elif closed:
            os.unlink(path)


def _closed(place: str) -> bool:
    mode = os.lstat(place).st_mode
    return stat.S_ISDIR(mode) and mode & 0o700 != 0o700
