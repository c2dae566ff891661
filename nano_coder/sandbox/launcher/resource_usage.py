"""What a process that still lives has used, as the kernel counts it: no program is believed."""

from __future__ import annotations

import os
import time


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads, without that of its children."""
    # the clock of another process, as clock_getcpuclockid builds its number
    return time.clock_gettime(~pid << 3 | 2)


class Books:
    """The kernel's books on one process, opened while it is known to be the one that is meant."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where they cannot be read."""
        self._pid = pid
        # stays that process's, whoever gets the number after it
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def cpu_seconds(self) -> float | None:
        """Processor time so far; None once the process is gone."""
        try:
            return cpu_seconds(self._pid)
        except OSError:
            return None

    def used(self) -> tuple[float, int] | None:
        """Processor time in seconds and the largest resident set in bytes; None where only its end will tell.

        That is so once it has waited for children: what they used is counted exactly when all is over.
        """
        try:
            fd = os.open(f"/proc/{self._pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.read(fd, 4096)
            finally:
                os.close(fd)
            seconds = cpu_seconds(self._pid)
            # last: where this still answers, the number was still its
            fields = os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()
            children_faults = int(fields[8])
            peak = status.partition(b"VmHWM:")[2].split(None, 1)
        except (OSError, IndexError, ValueError):
            return None  # it ended by itself meanwhile
        return None if children_faults or not peak else (seconds, int(peak[0]) * 1024)

    def close(self) -> None:
        os.close(self._stat)


def pid_of(handle: int) -> int:
    """The number of a pidfd's process in the pid namespace that /proc shows. Raises OSError for none."""
    with open(f"/proc/self/fdinfo/{handle}", "rb", buffering=0) as file:
        told = (file.read(1024) or b"").partition(b"Pid:")[2].split(None, 1)
    pid = int(told[0]) if told else -1
    if pid <= 0:
        raise ProcessLookupError(f"descriptor {handle} has no process here")
    return pid
