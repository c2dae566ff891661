"""Python source in a warm interpreter: the effect of `python -c` without starting one.

The runner is a fork of the zygote, which has started the interpreter and imported site and standard modules.
Hash seed and address layout are the zygote's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import io
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from . import kernel

_PRELOADED = (
    "abc", "ast", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "functools",
    "heapq", "itertools", "json", "math", "operator", "pathlib", "random", "re", "string", "textwrap",
    "traceback", "typing",
)  # fmt: skip
"""standard modules that programs import first; none of them starts a thread or opens a file"""
_REHEARSAL = "import math\n\n\ndef f(x):\n    return [x, math.pi, {'a': str(x)}]\n\n\nprint(f(1))\n"
_FLUSH_FAILED = 120
_PATIENCE_S = 1.0
_baseline: frozenset[str] = frozenset()
_newest = ""
"""the last of the modules that were imported in advance"""


def prepare() -> None:
    """In the zygote, once: import the modules of `_PRELOADED`."""
    global _baseline, _newest
    for name in _PRELOADED:
        importlib.import_module(name)
    _baseline = frozenset(sys.modules)
    _newest = next(reversed(sys.modules))


def rehearse() -> None:
    """Run the steps of `run` without effect, in a waiting runner, so that its page faults are over."""
    if not _baseline:
        return
    path, argv, main = sys.path[:], sys.argv, sys.modules["__main__"]
    make_ready()
    _prepare({"env": dict(os.environ), "argv": [], "isolated": False})
    _status(_REHEARSAL, sys.modules["__main__"])
    _let_go(sys.modules["__main__"])
    sys.path[:], sys.argv, sys.modules["__main__"] = path, argv, main


def make_ready() -> None:
    """In a runner with the program's streams: set up everything that does not depend on the request."""
    if not _baseline:
        return
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    sys.modules["random"].seed()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __loader__=importlib.machinery.BuiltinImporter)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    # freeze: objects that exist now are skipped by the collection at the program's end
    gc.freeze()


def run(request: dict[str, Any], say_done: Callable[[int], bool]) -> NoReturn:
    """Run `request["source"]` as the main module, and end the process as Python would.

    `say_done` gets the exit code just before that, from this process only, not from forks; it returns True if
    somebody got the code, who then kills this process.
    """
    pid = os.getpid()
    _prepare(request)
    main = sys.modules["__main__"]
    status = _status(request["source"], main)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flushed = _let_go(main)
    status = status or flushed
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    if os.getpid() == pid and say_done(status):
        # the agent reads this process's usage and has it killed: it must not exit by itself before that
        time.sleep(_PATIENCE_S)
    os._exit(status)


def _prepare(request: dict[str, Any]) -> None:
    """Set up environment, arguments and sys.path for the program."""
    if os.environ != request["env"]:
        os.environ.clear()
        os.environ.update(request["env"])
    sys.argv = ["-c", *request["argv"]]
    if not request["isolated"]:
        sys.path.insert(0, "")


def _open_streams() -> None:
    def stream(fd: int, mode: str, errors: str, buffering: int = -1) -> io.TextIOWrapper:
        opened = open(fd, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        assert isinstance(opened, io.TextIOWrapper)
        return opened

    # as Python opens them in the locale C.UTF-8
    sys.stdin = sys.__stdin__ = stream(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stream(1, "w", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2, "w", "backslashreplace", 1)  # type: ignore[misc]


def _status(source: str, main: types.ModuleType) -> int:
    """The exit status of the source; prints tracebacks without the frames of this file."""
    try:
        exec(compile(source, "<string>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
        return 1
    return 0


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _let_go(main: types.ModuleType) -> int:
    """Release the program's objects, and flush. Returns the exit status of the flush."""
    # files that the program left open are flushed when they are collected
    if len(sys.modules) != len(_baseline) or next(reversed(sys.modules)) != _newest:
        # only if something was imported: touching every module's name copies its page
        for name in set(sys.modules) - _baseline - {"__main__"}:
            sys.modules.pop(name, None)
    main.__dict__.clear()
    gc.collect()
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            with contextlib.suppress(ValueError):  # the program closed it
                stream.flush()
        except OSError:
            status = _FLUSH_FAILED
    return status
