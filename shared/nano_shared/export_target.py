"""Where an export goes: standard output, or a file or folder that is whole or absent."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from nano_shared.durable import durable_folder, sync
from nano_shared.errors import UsageError
from nano_shared.full_disk import full_disk_explained


@contextmanager
def new_file(path: Path | None) -> Iterator[TextIO]:
    """A file that appears when the block ends without an error; None is standard output.

    Raises UsageError where the name is taken or its folder cannot be written.
    """
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with new_binary(path) as temporary:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()


@contextmanager
def new_binary(path: Path) -> Iterator[Path]:
    """A name beside `path` for a file that becomes `path` when the block ends without an error."""
    _refuse_unwritable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with full_disk_explained(path, UsageError):
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path` when the block ends without an error."""
    _refuse_unwritable(path)
    with durable_folder(path, UsageError) as folder:
        yield folder


def _refuse_unwritable(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already; name another with -o")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another with -o")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: {path.parent} is not writable for this user; name another with -o")
