"""Start and end of programs: rlimits, signals and exec before; kill, reap and wait status after."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from typing import Any, NoReturn

from . import kernel

_KINDS = {name: kind for name, kind in vars(resource).items() if name.startswith("RLIMIT_")}


KEPT = (kernel.CAP_DAC_OVERRIDE, kernel.CAP_DAC_READ_SEARCH, kernel.CAP_FOWNER, kernel.CAP_SETPCAP)
"""capabilities that trusted code keeps over the jail's files; programs get none"""


def close_all_but(kept: set[int]) -> None:
    low = 0
    for fd in [*sorted(kept), 1 << 20]:
        # closerange with an empty range that begins at 0 would close everything
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1


def limit(limits: dict[str, int]) -> None:
    """Lower rlimits, soft and hard; lower ones stay."""
    for name, value in limits.items():
        soft, hard = resource.getrlimit(_KINDS[name])
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if (soft, hard) != (most, most):
            resource.setrlimit(_KINDS[name], (most, most))


def reset_signals() -> None:
    """Restore default handlers and unblock signals, which the parent process may have changed."""
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_own_signals() -> None:
    """As `reset_signals`, in a fork of a process that called it: only the signals that Python sets at
    start."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Exec the program; if it does not exist, print a message and exit as a shell does."""
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)


def kill_all() -> None:
    """Kill every process of this pid namespace that this process may signal; pid 1 is never among them."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def end_everything(program: int) -> tuple[int, float, int]:
    """Kill and reap all other processes. Returns the program's wait status, CPU seconds, and peak resident
    set."""
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
    """A wait status as (exit code, signal), one of them None."""
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, -code)


def outcome(status: int, used: float, peak: int, *, oom: bool) -> dict[str, Any]:
    """Wait status and usage as the record that the agent reads."""
    exit_code, number = exit_status(status)
    return {"exit_code": exit_code, "signal": number, "oom": oom, "cpu_s": used, "peak_bytes": peak}
