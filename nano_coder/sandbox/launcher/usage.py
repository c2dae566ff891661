"""What a process that still lives has used, as the kernel counts it: no program is believed."""

from __future__ import annotations

import time


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads, without that of its children."""
    # the clock of another process, as clock_getcpuclockid builds its number
    return time.clock_gettime(~pid << 3 | 2)


def of_one(pid: int) -> tuple[float, int] | None:
    """Processor time in seconds and the largest resident set in bytes; None where only its end will tell.

    That is so once it has waited for children: what they used is counted exactly when all is over.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = (file.read(1024) or b"").rpartition(b")")[2].split()
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            status = file.read(4096) or b""
        children_faults = int(fields[8])
        peak = status.partition(b"VmHWM:")[2].split(None, 1)
        if children_faults or not peak:
            return None
        return cpu_seconds(pid), int(peak[0]) * 1024
    except (OSError, IndexError):
        return None  # it ended by itself meanwhile
