"""Large workspaces, unpacked once: the lower, read-only half of the overlays that jails see.

A base is a folder of NANO_HOME/bases named by the hash of its stream. Whoever needs one builds it beside its
place under a lock and renames it there, so that builders may race and be killed: a folder of that name is
whole.
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
"""from this many files and directories on, an overlay is quicker than a stream"""
KEPT = 20
"""bases that stay when a new one is built, the latest used first"""
_TREE = "tree"
_CHUNK = 1 << 20
_in_use: dict[str, int] = {}


def folder() -> Path:
    return nano_home() / "bases"


def supported() -> bool:
    """Whether the kernel has overlays at all; a jail finds out whether it may mount one."""
    try:
        return "\toverlay\n" in Path("/proc/filesystems").read_text()
    except OSError:
        return False


def base_of(stream: IO[bytes], owner: int | None) -> str:
    """The name of the base with what the stream holds, built where it is not there yet.

    `owner` is the uid and gid whose files they are to be, where it is not ours. From now on until this
    process ends nobody removes the base. Raises OSError where it cannot be built.
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
    """A shared lock on a base that is whole."""
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
    _remove(building)  # of a builder that was killed
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
    """Remove what killed builders left, and the bases that were used longest ago, if nobody uses them."""
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
    """Whether nobody builds or uses it; nobody does in the block."""
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
    """Whatever its permissions and however deep; nothing where there is nothing."""
    with contextlib.suppress(OSError):
        files.clear(os.fspath(path))
        path.rmdir()
