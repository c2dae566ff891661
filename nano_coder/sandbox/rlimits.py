"""What the kernel limits of each process of a jail; set inside, where a user namespace counts anew."""

from __future__ import annotations

from nano_shared.types import Limits

FILE_MB = 256
"""longest single file"""
PROCESSES = 64
_MB = 1 << 20


ALWAYS = {
    "RLIMIT_NOFILE": 256,
    "RLIMIT_NPROC": PROCESSES,
    "RLIMIT_CORE": 0,
    "RLIMIT_MEMLOCK": 0,
    "RLIMIT_MSGQUEUE": 0,
    "RLIMIT_SIGPENDING": 256,
}
"""what no request decides, nor hinders the trusted code that serves it: set before one comes"""


def rlimits(limits: Limits) -> dict[str, int]:
    """Name of the resource -> soft and hard limit."""
    return {**of_request(limits), **ALWAYS}


def of_request(limits: Limits) -> dict[str, int]:
    """Those beside `ALWAYS`."""
    return {"RLIMIT_AS": limits.memory_mb * _MB, "RLIMIT_FSIZE": FILE_MB * _MB}
