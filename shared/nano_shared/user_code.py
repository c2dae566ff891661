"""Code of users while it runs: functions of files and of installed packages, called in this process.

Every call of one passes `user_code`: what it prints goes to stderr, and one that does not end is named there.
Coroutines of all calls run in one event loop, so that a semaphore or a client made once stays usable.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from nano_shared.printable import IN_USER_CODE, one_line

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
PATIENCE = 60.0
"""seconds after which a call is named on stderr, and again each time that it has taken twice as long"""
GRACE = 10.0
"""seconds that a call which is under way has to end after Ctrl-C"""
OURS = ("nano_coder", "nano_rl", "nano_shared")
_calls: dict[object, tuple[str, float]] = {}
"""call under way -> its name, and its start by the monotonic clock"""
_lock = threading.Lock()
_watcher: threading.Thread | None = None


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Within the block runs code of users, which messages call `name`."""
    call, before = object(), IN_USER_CODE.set(True)
    with _lock:
        _calls[call] = (name, time.monotonic())
        _start_watcher()
    try:
        yield
    finally:
        IN_USER_CODE.reset(before)
        del _calls[call]


def _start_watcher() -> None:
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # as after a fork
        _watcher = threading.Thread(target=_watch, name="nano-user-code", daemon=True)
        _watcher.start()


def _watch() -> None:
    global _watcher
    due: dict[str, float] = {}
    while True:
        time.sleep(min(1.0, PATIENCE / 4))
        with _lock:
            calls = list(_calls.values())
            if not calls:
                _watcher = None
                return
        since = {name: min(began for other, began in calls if other == name) for name, _ in calls}
        due = {name: due.get(name, PATIENCE) for name in since}
        for name, began in since.items():
            if (seconds := time.monotonic() - began) >= due[name]:
                due[name] = 2 * seconds
                _say(f"{name} has been running for {seconds:.0f} s and is waited for; Ctrl-C ends that")


def _say(text: str) -> None:
    print(f"nano: {one_line(text, 500)}", file=sys.stderr, flush=True)


def leave_hanging_calls(signal_number: int = signal.SIGINT) -> None:
    """After Ctrl-C: unless the calls that are under way end within GRACE, interrupt once more, then exit."""
    under_way = dict(_calls)

    def look() -> None:
        time.sleep(GRACE)
        if left := [name for call, (name, _) in under_way.items() if call in _calls]:
            _say(f"{left[0]} is still running {GRACE:g} s later, and is not waited for")
            os.kill(os.getpid(), signal_number)
            time.sleep(GRACE / 2)
            os._exit(128 + signal_number)

    if under_way:
        threading.Thread(target=look, name="nano-leave", daemon=True).start()


@contextmanager
def interrupted_in_time() -> Iterator[None]:
    """Within the block Ctrl-C does not wait for user code that hangs in another thread."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: Any) -> None:
        leave_hanging_calls()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    import asyncio  # a fifth of the time that `--help` takes

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="nano-user-loop", daemon=True).start()
    return loop


def result_of(function: Callable[..., Any], *args: Any, seconds: float | None = None, **named: Any) -> Any:
    """What a function of users returns, awaited if it is `async`.

    Raises TimeoutError if that takes more than `seconds`; the function then goes on in a thread of its own.
    """
    began = time.monotonic()
    call = functools.partial(function, *args, **named)
    result = call() if seconds is None else _in_thread(call).result(seconds)
    if not inspect.isawaitable(result):
        return result

    async def awaited() -> tuple[Any, BaseException | None]:
        try:
            return await result, None
        except (SystemExit, KeyboardInterrupt) as problem:  # would end the loop
            return None, problem

    from asyncio import run_coroutine_threadsafe

    future = run_coroutine_threadsafe(awaited(), _event_loop(os.getpid()))
    try:
        value, problem = future.result(
            None if seconds is None else max(0.0, seconds + began - time.monotonic())
        )
    finally:
        future.cancel()
    if problem is not None:
        raise problem
    return value


def _in_thread(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as problem:  # raised again by who waits
            future.set_exception(problem)

    threading.Thread(target=run, name="nano-user-call", daemon=True).start()
    return future


def read_number(value: object) -> float | None:
    """A number of any library as a float: numpy and torch scalars, bools, decimals, fractions.

    None for what is no number, such as text. NaN and infinity are returned as they are.
    """
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        if callable(item := getattr(value, "item", None)):  # an array with one element
            value = item()
        return None if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def error_text(problem: BaseException) -> str:
    """Its type and its message; of a value that a model of pydantic refuses, the first that is wrong."""
    pydantic = sys.modules.get("pydantic")  # whose import takes a command's time
    if pydantic and isinstance(problem, pydantic.ValidationError):
        first = problem.errors()[0]
        return f"ValidationError: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def raised_at(problem: BaseException) -> str:
    """The file and line of users' code that raised, as " (FILE, line N)"; empty if it has none."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(problem.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in OURS
    ]
    own = [(file, line) for file, line in frames if not _is_library(file)]
    if isinstance(problem, SyntaxError) or not own:
        return ""  # the message of a syntax error has its place
    file, line = own[-1]
    return f" ({os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}, line {line})"


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", *_libraries()))


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()})


_sources: dict[str, str] = {}
"""file of users that this process has imported -> hash of its source then"""


def note_source(path: Path) -> None:
    """Keep the hash of a file of users, which is imported now."""
    from nano_shared.durable import file_hash

    _sources.setdefault(str(path), file_hash(path))  # imported once


def source_hashes() -> dict[str, str]:
    """Every file of users that this process has imported, with the hash of its source then."""
    return dict(_sources)


def source_hash(value: object) -> str | None:
    """The hash of the file that a module, a class, a function or an object comes from; None for ours."""
    named = str(getattr(value, "__module__", None))
    module = value if isinstance(value, ModuleType) else sys.modules.get(named)
    file = getattr(module, "__file__", None)
    return _sources.get(os.path.realpath(file)) if file else None
