"""Turns the operating system's "no space left" into an error that names the path and the way out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_shared.errors import LogError, NanoError

# EFBIG is what a file size limit (ulimit -f) looks like to the program that meets it.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

WAY_OUT = "free some space, or keep nano's data elsewhere by setting NANO_HOME"


@contextmanager
def full_disk_explained(path: Path, error_type: type[NanoError] = LogError) -> Iterator[None]:
    """Raises `error_type` for a full disk, an exhausted quota or a file size limit."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise error_type(f"no space left while writing {path} ({error.strerror}): {WAY_OUT}") from error
