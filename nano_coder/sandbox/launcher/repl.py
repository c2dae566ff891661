"""Python that keeps its state between requests, and prints the value of a last expression."""

from __future__ import annotations
import __future__

import ast
import contextlib
import io
import linecache
import os
import resource
import sys
import types
from typing import Any

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


class Interpreter:
    """One `__main__` for every request. What a fork of it returns to is not our loop, but the fork's end."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._main = types.ModuleType("__main__")
        self._main.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = self._main
        sys.argv = [""]
        self._flags = 0
        self._requests = 0

    def run(self, source: str, stdin: int) -> dict[str, Any]:
        os.dup2(stdin, 0)
        sys.stdin = io.TextIOWrapper(
            open(0, "rb", closefd=False),  # noqa: SIM115 (it stays)
            encoding="utf-8",
            errors="surrogateescape",
        )
        used = _cpu_seconds()
        code, ended = self._execute(source)
        _flush()
        if os.getpid() != self._pid:
            os._exit(code)
        return {
            "exit_code": code,
            "signal": None,
            "ended": ended,
            "cpu_s": _cpu_seconds() - used,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _execute(self, source: str) -> tuple[int, bool]:
        """Exit code, and whether the source asked to end the session."""
        self._requests += 1
        name = f"<request {self._requests}>"
        # for the lines that a traceback shows
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
        # both before either runs, so that an error of syntax has no effect
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
    """The traceback, without the frames of this file."""
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
        # the program may have closed it, or put something else there
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
