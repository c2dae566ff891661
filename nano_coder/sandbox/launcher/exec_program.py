"""The last steps of a process before it is the user's program: limits, signals, exec."""

from __future__ import annotations

import errno
import os
import resource
import signal
from typing import NoReturn

from . import kernel

_KINDS = {name: kind for name, kind in vars(resource).items() if name.startswith("RLIMIT_")}


KEPT = (kernel.CAP_DAC_OVERRIDE, kernel.CAP_DAC_READ_SEARCH, kernel.CAP_FOWNER, kernel.CAP_SETPCAP)
"""capabilities of trusted code over the jail's own files; a program gets none"""


def close_all_but(kept: set[int]) -> None:
    low = 0
    for fd in [*sorted(kept), 1 << 20]:
        # an empty range that begins at 0 would close everything
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1


def limit(limits: dict[str, int]) -> None:
    """Lower these limits, soft and hard, as far as they are not lower already."""
    for name, value in limits.items():
        soft, hard = resource.getrlimit(_KINDS[name])
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if (soft, hard) != (most, most):
            resource.setrlimit(_KINDS[name], (most, most))


def reset_signals() -> None:
    """Whoever started us may have ignored or blocked some."""
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_own_signals() -> None:
    """As `reset_signals`, in a fork of a process that did so: only what Python itself has set since."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Become the program; where there is none, say so and end as a shell does."""
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)
