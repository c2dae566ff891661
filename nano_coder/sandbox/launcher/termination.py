"""How a jail ends what runs in it, and what is told of a program's end."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


def kill_all() -> None:
    """Kill every process of this pid namespace that this one may signal; pid 1 is never among them."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def end_everything(program: int) -> tuple[int, float, int]:
    """Kill and reap every other process: the program's wait status, CPU seconds, the largest resident set."""
    status, used, peak = 0, 0.0, 0
    kill_all()
    while True:
        try:
            pid, ended, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, used, peak
        used += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss * 1024)
        if pid == program:
            status = ended


def exit_status(status: int) -> tuple[int | None, int | None]:
    """A wait status as exit code and signal, one of them None."""
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, -code)


def outcome(status: int, used: float, peak: int, *, oom: bool) -> dict[str, Any]:
    """A wait status and what was used, as the agent is told."""
    exit_code, number = exit_status(status)
    return {"exit_code": exit_code, "signal": number, "oom": oom, "cpu_s": used, "peak_bytes": peak}
