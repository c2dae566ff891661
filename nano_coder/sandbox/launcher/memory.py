"""The memory a jail uses, summed over its processes: no rlimit counts that."""

from __future__ import annotations

import os
import resource

_PAGE = resource.getpagesize()
_US = frozenset({"self", "1"})


def in_use() -> int:
    """Bytes held by every process of this pid namespace but init; pages that two share count twice."""
    total = 0
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                fields = file.read().split()
        except OSError:
            continue  # it ended between the listing and the reading
        total += (int(fields[1]) - int(fields[2])) * _PAGE
    return total


def proportional() -> int:
    """Bytes with each shared page counted once; slower, so asked only when the upper bound is too high."""
    total = 0
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith(b"Pss_Anon:"))
        except OSError:
            continue
    return total * 1024


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name not in _US]
