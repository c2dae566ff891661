"""Temporary folders that are removed by their owner or, if it was killed, by the next process that makes one.

An owner holds a lock on its folder, which the kernel releases when its last process ends. A folder with our
prefix and a free lock belongs to nobody.
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

from nano_shared.durable import user_path


def nano_home() -> Path:
    """The data folder, absolute. It is created by whoever writes into it."""
    chosen = os.environ.get("NANO_HOME")
    return user_path(chosen).absolute() if chosen else platformdirs.user_data_path("nano")


PREFIX = "nano-scratch-"
_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30
"""free bytes that /dev/shm must have to be used: four of the largest workspaces, or the log of 20,000
checks"""

_swept: set[tuple[int, str]] = set()
_lock = threading.Lock()


class ScratchFolder:
    """A temporary folder under `parent`; by default under the directory for temporary files."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """`kind` becomes part of its name. Raises OSError if no folder can be created."""
        parent = parent or tempfile.gettempdir()
        _sweep_once(parent)
        self._owner = os.getpid()
        self.path, self._held = _new_folder(kind, parent)

    def remove(self) -> None:
        """Remove the folder and its contents; does nothing in a fork of its owner. Idempotent."""
        if self._held < 0 or os.getpid() != self._owner:
            return
        _remove(self.path)
        os.close(self._held)
        self._held = -1


@contextmanager
def scratch_folder(kind: str, parent: str | None = None) -> Iterator[Path]:
    """A temporary folder, removed after the block."""
    folder = ScratchFolder(kind, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def in_memory() -> str | None:
    """A parent for folders in memory, if there is one with room; else None."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
            return str(_MEMORY)
    return None


def is_scratch(folder: Path) -> bool:
    """Whether a folder is, or lies in, a temporary folder of ours."""
    return any(part.startswith(PREFIX) for part in folder.parts)


def sweep(parent: str) -> None:
    """Remove the folders under `parent` whose owners have ended."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX):
            continue
        with suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # folders of other users are not ours to remove
                if os.geteuid() in (0, os.fstat(descriptor).st_uid):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(Path(entry.path))
            finally:
                os.close(descriptor)


def _sweep_once(parent: str) -> None:
    with _lock:
        if (os.getpid(), parent) in _swept:
            return
        _swept.add((os.getpid(), parent))
    with suppress(OSError):
        sweep(parent)


def _new_folder(kind: str, parent: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        # a concurrent sweep may remove it before it is locked: then create another
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return path, descriptor
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path, onerror=_open_up)
    except RecursionError:  # a program nested its folders deeper than Python's recursion limit
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", os.fspath(path)], check=False, capture_output=True)


def _open_up(function: Callable[..., object], path: str, problem: object) -> None:
    """Retry after restoring rights that a program took from its own folders."""
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
