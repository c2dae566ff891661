"""A shell that keeps its variables and its directory between requests.

The shell reads orders from a pipe that it alone holds, and reports each end on another that is closed while
the text of a request runs. This process stands between it and the agent, and no program can look into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
from typing import Any, NoReturn

from . import exec_program, kernel

_ORDERS, _REPORTS = 9, 8
_LONGEST_REPORT = 4096
_FORGED = {"forged": True}
"""somebody else than the shell reported; the agent ends a session that answers this"""


class Shell:
    def __init__(self) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        orders, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _become_shell(orders, reports)
            finally:
                os._exit(126)
        os.close(orders)
        os.close(reports)
        os.chdir("/")
        self._used = 0.0
        # the shell holds it open already, and no program shall
        self._order(f"exec {_ORDERS}<&-\n")

    def run(self, source: str, stdin: int) -> dict[str, Any]:
        nonce = secrets.token_hex(16)
        if select.select([self._reports], [], [], 0)[0]:
            # it ended between the requests, or somebody wrote a report that nobody asked for
            return _FORGED if self._report() else self._ending()
        given = _stdin_file(stdin)
        # `command`, since a shell ends at a syntax error of a special builtin
        order = f"command eval {_quoted(source)} {_REPORTS}>&- <{_quoted(given or os.devnull)}\n"
        self._order(f"{order}printf '%s %s\\n' {nonce} \"$?\" >&{_REPORTS}\n")
        word = self._report()
        if given is not None:
            with contextlib.suppress(OSError):
                os.unlink(given)
        if not word:
            return self._ending()
        told, _, code = word.strip().partition(" ")
        if told != nonce or not code.isdecimal() or int(code) > 255:
            return _FORGED
        before, self._used = self._used, _cpu_seconds(self._pid)
        return {
            "exit_code": int(code), "signal": None, "ended": False,
            "cpu_s": max(0.0, self._used - before), "peak_bytes": 0,
        }  # fmt: skip

    def _order(self, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape")
        with contextlib.suppress(BrokenPipeError):  # it ended; the report says so
            while data:
                data = data[os.write(self._orders, data) :]

    def _report(self) -> str:
        """One line, or nothing where the shell has ended."""
        line = b""
        while not line.endswith(b"\n") and len(line) < _LONGEST_REPORT:
            if not (chunk := os.read(self._reports, _LONGEST_REPORT)):
                return ""
            line += chunk
        return line.decode("ascii", "replace")

    def _ending(self) -> dict[str, Any]:
        _, status, usage = os.wait4(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return {
            "exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None, "ended": True,
            "cpu_s": max(0.0, usage.ru_utime + usage.ru_stime - self._used),
            "peak_bytes": usage.ru_maxrss * 1024,
        }  # fmt: skip


def _become_shell(orders: int, reports: int) -> NoReturn:
    # above both numbers first, so that no copy overwrites one that is still needed
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (orders, reports)]
    os.dup2(held[0], _ORDERS)
    os.dup2(held[1], _REPORTS)
    os.closerange(10, 1 << 16)
    exec_program.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    exec_program.execute(["/bin/sh", f"/dev/fd/{_ORDERS}"], dict(os.environ))


def _stdin_file(stdin: int) -> str | None:
    """The path of a file with what there is to read, or None where there is nothing."""
    if os.fstat(stdin).st_size == 0:
        return None
    path = f"/tmp/.stdin-{secrets.token_hex(8)}"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while chunk := os.read(stdin, 1 << 20):
            file.write(chunk)
    return path


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _cpu_seconds(pid: int) -> float:
    """Of a process and of what it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
