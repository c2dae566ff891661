"""Turns the operating system's "no space left" into an error that names the path and the way out."""

from __future__ import annotations

import errno
import os
import re
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
