"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path

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


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                     "fordblks", "keepcost")
    ]  # fmt: skip


def return_freed_memory(keep: int = 4 << 30) -> None:
    """Give back what is freed and held by now, where that is more than `keep` bytes.

    What is kept is used again where it fits, and what does not fit is added to it: over the steps of a
    training on rows of all lengths, memory grows to a multiple of what a step needs. Giving back costs a page
    fault every 4 KiB of the next step, a sixth of its time, so it is not done for less. Elsewhere than on
    glibc 2.33 or newer this does nothing.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallInfo
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        told = library.mallinfo2()
        if resident - told.uordblks - told.hblkhd > keep:
            library.malloc_trim(0)
