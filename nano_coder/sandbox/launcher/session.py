"""The inside of a stateful session: a shell or a Python interpreter that serves requests on a socket.

It answers a request by an outcome record. The agent ends the session at an answer that nobody asked for.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import errno
import fcntl
import io
import linecache
import os
import resource
import secrets
import select
import signal
import socket
import sys
import types
from typing import Any, NoReturn

from . import exec_program, files, kernel, message
from .message import RequestOutcome

_ORDERS, _REPORTS = 9, 8
_LONGEST_REPORT = 4096


class Forged(Exception):
    """Another process than the shell wrote a report."""


class ShellSession:
    """A POSIX shell that stays alive and evaluates one request after another."""

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
        # the shell has it open already; programs must not inherit it
        self._order(f"exec {_ORDERS}<&-\n")

    def run(self, source: str, stdin: int) -> RequestOutcome:
        nonce = secrets.token_hex(16)
        if select.select([self._reports], [], [], 0)[0]:
            # the shell ended between requests, or another process wrote a report
            if self._report():
                raise Forged
            return self._ending()
        given = _stdin_file(stdin)
        # `command`, since a shell exits at a syntax error of a special builtin
        order = f"command eval {_quoted(source)} {_REPORTS}>&- <{_quoted(given or os.devnull)}\n"
        self._order(f"{order}printf '%s %s\\n' {nonce} \"$?\" >&{_REPORTS}\n")
        report_line = self._report()
        if given is not None:
            with contextlib.suppress(OSError):
                os.unlink(given)
        if not report_line:
            return self._ending()
        nonce_read, _, code = report_line.strip().partition(" ")
        if nonce_read != nonce or not code.isdecimal() or int(code) > 255:
            raise Forged
        before, self._used = self._used, _cpu_seconds(self._pid)
        return RequestOutcome(int(code), cpu_s=max(0.0, self._used - before))

    def _order(self, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape")
        with contextlib.suppress(BrokenPipeError):  # it ended; the missing report shows that
            while data:
                data = data[os.write(self._orders, data) :]

    def _report(self) -> str:
        """One line; empty if the shell has ended."""
        line = b""
        while not line.endswith(b"\n") and len(line) < _LONGEST_REPORT:
            if not (chunk := os.read(self._reports, _LONGEST_REPORT)):
                return ""
            line += chunk
        return line.decode("ascii", "replace")

    def _ending(self) -> RequestOutcome:
        _, status, usage = os.wait4(self._pid, 0)
        code, number = exec_program.exit_status(status)
        used = max(0.0, usage.ru_utime + usage.ru_stime - self._used)
        return RequestOutcome(code, number, False, used, usage.ru_maxrss * 1024, ended=True)


def _become_shell(orders: int, reports: int) -> NoReturn:
    # first above both numbers, so that no copy overwrites one that is still needed
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (orders, reports)]
    os.dup2(copies[0], _ORDERS)
    os.dup2(copies[1], _REPORTS)
    os.closerange(10, 1 << 16)
    exec_program.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    exec_program.execute(["/bin/sh", f"/dev/fd/{_ORDERS}"], dict(os.environ))


def _stdin_file(stdin: int) -> str | None:
    """Path of a file with the request's standard input; None if that is empty."""
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
    """Processor time of a process and its reaped children, seconds."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


_FUTURES = 0
"""compiler flags of every `from __future__` feature"""
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


class PythonSession:
    """One Python `__main__` for all requests. A fork that returns from a request exits."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._main = types.ModuleType("__main__")
        self._main.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = self._main
        sys.argv = [""]
        self._flags = 0
        self._requests = 0

    def run(self, source: str, stdin: int) -> RequestOutcome:
        os.dup2(stdin, 0)
        sys.stdin = io.TextIOWrapper(
            open(0, "rb", closefd=False),  # noqa: SIM115 (it stays)
            encoding="utf-8",
            errors="surrogateescape",
        )
        used = _own_cpu_seconds()
        code, ended = self._execute(source)
        _flush()
        if os.getpid() != self._pid:
            os._exit(code)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return RequestOutcome(code, cpu_s=_own_cpu_seconds() - used, peak_bytes=peak, ended=ended)

    def _execute(self, source: str) -> tuple[int, bool]:
        """Exit code, and whether the source asked to end the session."""
        self._requests += 1
        name = f"<request {self._requests}>"
        # for the source lines of tracebacks
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            self._execute_parts(source, name)
        except SystemExit as leaving:
            return _exit_status(leaving.code), True
        except BaseException as error:
            _show(error)
            return 1, False
        return 0, False

    def _execute_parts(self, source: str, name: str) -> None:
        flags = ast.PyCF_ONLY_AST | self._flags
        tree: ast.Module = compile(source, name, "exec", flags, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # compiled before anything runs, so that a syntax error has no effect
        parts = [self._compile(tree, name, "exec")]
        if last is not None:
            parts.append(self._compile(ast.Interactive([last]), name, "single"))
        for part in parts:
            exec(part, self._main.__dict__)

    def _compile(self, tree: ast.Module | ast.Interactive, name: str, mode: str) -> types.CodeType:
        code: types.CodeType = compile(tree, name, mode, self._flags, dont_inherit=True)
        self._flags |= code.co_flags & _FUTURES
        return code


def _show(error: BaseException) -> None:
    """Print the traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush() -> None:
    streams: list[Any] = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    for stream in streams:
        # the program may have closed or replaced the stream
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _own_cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


_WORK = "/work"


def serve(kind: str) -> NoReturn:
    """Serve the socket on standard input until the other side closes it or the program ends."""
    channel = _take_channel()
    session = ShellSession() if kind == "shell" else PythonSession()
    while (received := message.receive(channel)) is not None:
        request, (stdin,) = received
        try:
            answer = message.encode_outcome(_answered(session, request, stdin))
        except Forged:
            answer = b"forged"
        channel.sendall(answer)
    os._exit(0)


def _take_channel() -> socket.socket:
    """The socket, moved where programs do not inherit it; makes the received streams our output."""
    # a high number, so that a program finds no descriptor of ours among the low ones
    channel = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 200))
    received = message.receive(channel)
    if received is None:
        os._exit(0)
    # standard input too: what the session starts must not get the socket
    streams = [os.open(os.devnull, os.O_RDONLY), *received[1]]
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    return channel


def _answered(session: ShellSession | PythonSession, request: dict[str, Any], stdin: int) -> RequestOutcome:
    try:
        for name, text in request["files"].items():
            _write(name, text.encode("utf-8", "surrogatepass"))
    except OSError as error:
        os.close(stdin)
        what = f"{error.filename}: {error.strerror or error}"
        return RequestOutcome(message.REFUSED, refused=(error.errno or errno.EINVAL, what))
    try:
        return session.run(request["source"], stdin)
    finally:
        with contextlib.suppress(OSError):  # the program may have closed it
            os.close(stdin)


def _write(name: str, data: bytes) -> None:
    path = os.path.join(_WORK, files.check_path(name))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
