"""What a caller may ask of a run, checked before anything starts, and the environment it gets."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Mapping, Sequence

from nano_shared.errors import UsageError
from nano_shared.types import Limits

WEEK_S = 604_800.0
"""longest time-out of a run, seconds"""
TERABYTE_MB = 1 << 20
"""most memory of a run, MB"""


def seal(data: bytes) -> int:
    """A file descriptor at the beginning of `data`; the caller closes it."""
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def check_run(argv: Sequence[str], env: Mapping[str, str], timeout: float, output_bytes: int) -> None:
    """Raises UsageError for what no program can be given."""
    if isinstance(argv, str) or not argv or not argv[0]:
        raise UsageError(f"argv must be a list with a program first, not {argv!r}")
    for text in (*argv, *env, *env.values()):
        if "\0" in text:
            raise UsageError(f"{text!r} holds a NUL byte, which no argument or variable can")
    for name in env:
        if not name or "=" in name:
            raise UsageError(f"{name!r} cannot name an environment variable")
    if not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if output_bytes < 1:
        raise UsageError(f"output_bytes must be positive, not {output_bytes!r}")


def python_program(python: str, source: str, argv: Sequence[str], *, isolated: bool) -> list[str]:
    """The command line that runs Python source."""
    return [python, *(["-I"] if isolated else []), "-c", source, *argv]


def check_limits(limits: Limits) -> Limits:
    """Raises UsageError for limits that were built around their own validation."""
    for name in ("tool_seconds", "memory_mb", "output_bytes"):
        value = getattr(limits, name, None)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"limits.{name} must be a positive number, not {value!r}")
    return limits


def minimal_environment(search_path: str) -> dict[str, str]:
    """The whole environment of a program, before what the caller adds."""
    return {
        "PATH": search_path,
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "user",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
