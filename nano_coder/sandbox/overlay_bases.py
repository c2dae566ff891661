"""Overlay bases: large workspaces, unpacked once as the read-only lower layer of jails' overlays.

A base is a folder of NANO_HOME/bases, named by the hash of its tar stream. It is built under a lock in a
temporary folder and renamed, so builders may race or be killed, and a folder with that name is always
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nano_coder.sandbox.launcher import files, kernel
from nano_shared.scratch import nano_home

ENTRIES = 400
"""number of entries from which an overlay is faster than streaming the workspace"""
KEPT = 20
"""number of bases that survive when a new one is built, most recently used first"""
_TREE = "tree"
_CHUNK = 1 << 20
_in_use: dict[str, int] = {}


def folder() -> Path:
    return nano_home() / "bases"


def supported() -> bool:
    """Whether the kernel has overlayfs; whether a jail may mount one shows when it tries."""
    try:
        return "\toverlay\n" in Path("/proc/filesystems").read_text()
    except OSError:
        return False


def base_of(stream: IO[bytes], owner: int | None) -> str:
    """The name of the base with the contents of the stream, built if it does not exist yet.

    `owner` is the uid and gid that own the files, if not ours. Until this process ends the base is not
    pruned. Raises OSError if it cannot be built.
    """
    stream.seek(0)
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    name = digest.hexdigest() + (f"-{owner}" if owner is not None else "")
    if name not in _in_use:
        folder().mkdir(parents=True, exist_ok=True, mode=0o755)
        _in_use[name] = _hold(name, stream, owner)
    with contextlib.suppress(OSError):
        os.utime(folder() / f"{name}.lock")
    return name


def _hold(name: str, stream: IO[bytes], owner: int | None) -> int:
    """Take a shared lock on a base, building it if needed. Returns the lock's descriptor."""
    lock = os.open(folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not (folder() / name).is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder() / name).is_dir():
                _prune()
                _build(folder() / name, stream, owner)
            fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        raise
    return lock


def _build(place: Path, stream: IO[bytes], owner: int | None) -> None:
    building = place.with_name(f"{place.name}.building")
    _remove(building)  # left by a builder that was killed
    tree = building / _TREE
    tree.mkdir(parents=True, mode=0o755)
    if owner is not None:
        os.chown(tree, owner, owner)
    stream.seek(0)
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    try:
        with contextlib.nullcontext() if owner is None else kernel.as_file_user(owner, owner):
            files.unpack(root, stream)
        os.chmod(tree, 0o755)
        os.rename(building, place)
    except OSError:
        _remove(building)
        raise
    finally:
        os.close(root)


def _prune() -> None:
    """Remove leftovers of killed builders, and the least recently used bases that no process uses."""
    locks = sorted(folder().glob("*.lock"), key=lambda path: path.stat().st_mtime, reverse=True)
    for number, path in enumerate(locks):
        building = path.with_name(f"{path.stem}.building")
        if number < KEPT and not building.exists():
            continue
        with _unused(path) as free:
            if free:
                _remove(building)
                if number >= KEPT:
                    _remove(path.with_suffix(""))


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether no process builds or uses the base; it stays locked inside the block."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a tree whatever its permissions and depth; does nothing if it does not exist."""
    with contextlib.suppress(OSError):
        files.clear(os.fspath(path))
        path.rmdir()
