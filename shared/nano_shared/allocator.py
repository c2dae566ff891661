"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of glibc's `mallopt`, from its malloc.h"""
_LARGEST = 2**31 - 1


@cache
def keep_freed_memory() -> None:
    """Have freed memory used again by this process, where glibc would give it back to the kernel.

    A large tensor is mapped when it is made and unmapped when it is freed, so that each one meets a page
    fault every 4 KiB. On two cores that was a third of a training step of a model of 135 M parameters, whose
    peak of resident memory did not grow. Elsewhere than on glibc this does nothing.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, _LARGEST)


def return_freed_memory() -> None:
    """Give back what is freed by now: between the steps of a training, whose sizes differ from step to step.

    Kept, it is used again where it fits, and what does not fit is added to it. Elsewhere than on glibc this
    does nothing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
