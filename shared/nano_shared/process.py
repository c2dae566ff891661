"""This process and its children: the C allocator, child interpreters on the host, a parser for threads."""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
"""the environment's form of -P"""


def own_python(*arguments: str) -> list[str]:
    """The command of a child interpreter, with -P."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_workers() -> Iterator[None]:
    """Meanwhile processes that `multiprocessing` spawns start as with -P, which it does not pass on."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of glibc's `mallopt`, from its malloc.h"""
_LARGEST = 2**31 - 1


@cache
def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it to the kernel.

    By default a large tensor is mapped when it is created and unmapped when it is freed, so each new one
    causes a page fault every 4 KiB. On two cores that took a third of a training step of a model of 135 M
    parameters, whose peak of resident memory did not change. Does nothing without glibc.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, _LARGEST)


def unmap_freed_memory() -> None:
    """Make glibc return each large tensor to the kernel as it is freed, in place of `keep_freed_memory`.

    For gradient checkpointing, where small states outlive large ones: kept between them, freed memory is in
    pieces, and the peak was a third higher. Does nothing without glibc.
    """
    keep_freed_memory()  # which is called once, and would undo it later
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 20)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                     "fordblks", "keepcost")
    ]  # fmt: skip


def return_freed_memory(keep: int = 4 << 30) -> None:
    """Return freed memory to the kernel if more than `keep` bytes of it are held.

    Held memory is reused where a new tensor fits; over training steps with rows of all lengths, the total
    grows to a multiple of what a step needs. Returning it costs a page fault every 4 KiB in the next step, a
    sixth of its time. Does nothing without glibc 2.33 or newer.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallInfo
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        usage = library.mallinfo2()
        if resident - usage.uordblks - usage.hblkhd > keep:
            library.malloc_trim(0)


_ONE_AT_A_TIME = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """`ast.parse`, for threads: CPython counts the depth of all trees that are made at once together, and two
    of them at the wrong moment are a SystemError (python/cpython#106905)."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)


def parse_expression(source: str) -> ast.Expression:
    """`ast.parse` of an expression, for threads."""
    with _ONE_AT_A_TIME:
        return ast.parse(source, mode="eval")
