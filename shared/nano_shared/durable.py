"""Files and folders that are whole or absent, whatever kills the process that writes them."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_shared.errors import LogError, NanoError

# EFBIG is what a file size limit (ulimit -f) looks like to the program that meets it.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_OS_ERROR = re.compile(r"\(os error (\d+)\)")

WAY_OUT = "free some space, or keep nano's data elsewhere by setting NANO_HOME"


@contextmanager
def full_disk_explained(path: Path, error_type: type[NanoError] = LogError) -> Iterator[None]:
    """Raises `error_type` for a full disk, an exhausted quota or a file size limit."""
    try:
        yield
    except _failures() as error:
        number = _number(error)
        if number not in _NO_SPACE:
            raise
        raise error_type(f"no space left while writing {path} ({os.strerror(number)}): {WAY_OUT}") from error


def _failures() -> tuple[type[Exception], ...]:
    """What a write may raise; weights are written by a library with an error of its own."""
    safetensors = sys.modules.get("safetensors")
    return (OSError, safetensors.SafetensorError) if safetensors else (OSError,)


def _number(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    found = _OS_ERROR.search(str(error))
    return int(found.group(1)) if found else 0


@contextmanager
def durable_folder(target: Path, error_type: type[NanoError]) -> Iterator[Path]:
    """Yields an empty folder beside `target`, which becomes `target` when the block ends without an error:
    its files and the folder are on disk before the rename, and the rename when this returns.

    A process that is killed leaves remains that `sweep` clears. The caller sees to it that `target` does not
    exist and that nobody else writes it. Raises `error_type` where the disk is full.
    """
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    with full_disk_explained(target, error_type):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            _sync_tree(temporary)
            os.rename(temporary, target)
            sync(target.parent)
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)


def sweep(folder: Path, name: str = "*") -> None:
    """Clear what killed writers left of `name` in `folder`."""
    for remains in folder.glob(f".{name}.tmp-*"):
        shutil.rmtree(remains)


def write_text(path: Path, text: str, error_type: type[NanoError] = LogError) -> None:
    """Write a file, or replace it whole. Raises `error_type` where the disk is full."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with full_disk_explained(path, error_type):
        try:
            with temporary.open("x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def file_hash(path: Path) -> str:
    """`sha256:` of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
