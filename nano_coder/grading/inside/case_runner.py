"""Runs hidden cases: calls the entry point on each in a fork, and reports the values.

This process never imports the artifact. A fork gives up the channel to the grader before it imports the
artifact, and answers through a pipe, so an exit, a hang or a changed global affects one fork only. No
expected value is in this jail: there is nothing to steal, and a forged answer has to be right.

`fork`: "case" runs each case in its own fork; "run" runs consecutive cases in one, as a test script does, and
continues in a new fork after a case that ends it. With bounds on the source, an audit hook refuses code that
was not measured; only imports, and the library modules that generate functions (dataclasses, named tuples),
may create code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from . import plain_values
from .report import LONGEST, LONGEST_NAME, ROOT, Malformed, load, name_of, read, write_files
from .value_codec import Crossing, NotPlain

_RUNNING = """
os.system os.exec os.posix_spawn pty.spawn subprocess.Popen sqlite3.connect ctypes.dlsym ctypes.dlsym/handle
ctypes.call_function cpython.PyInterpreterState_New code.__new__ function.__new__ marshal.loads marshal.load
pickle.find_class exec compile
"""
RUNNING = frozenset(_RUNNING.split())
ANYWHERE = frozenset(("code.__new__", "function.__new__", "marshal.loads", "pickle.find_class"))
"""events that the standard library causes for harmless purposes"""
WRITERS = frozenset(("dataclasses.py", "collections/__init__.py", "typing.py", "ast.py"))
LIBRARY = os.path.dirname(os.__file__) + "/"
_ANNOTATION = re.compile(r"[^()\\]*")
"""an annotation without calls"""


class HiddenCode(BaseException):
    """Code that was not measured was about to run."""


def watch(root: str, files: dict[str, str], forbidden: list[str]) -> list[str]:
    """Install the audit hook. Returns a list to which refused events are appended."""
    refused: list[str] = []
    measured = {os.path.join(root, name): text for name, text in files.items()}
    runs = frozenset(forbidden)
    frame_of, exists = sys._getframe, os.path.exists
    sys.dont_write_bytecode = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in RUNNING:
            fair = _fair(event, args, frame_of(1), measured)
        elif event == "import":
            ours = frame_of(1).f_code.co_filename.startswith(root)
            fair = not (ours and str(args[0]).partition(".")[0] in runs)
        elif event == "object.__setattr__":
            fair = args[1] != "__code__" or frame_of(1).f_code.co_filename.startswith(LIBRARY)
        elif event == "open":
            path = str(args[0])
            fair = not (path.startswith(root) and path.endswith(".pyc") and exists(path))
        else:
            return
        if not fair:
            refused.append(event)
            raise HiddenCode(event)

    sys.addaudithook(hook)
    return refused


def _fair(event: str, args: tuple[Any, ...], frame: types.FrameType, measured: dict[str, str]) -> bool:
    caller = frame.f_code.co_filename
    imports = caller.startswith("<frozen ")
    if not imports and not caller.startswith(LIBRARY):
        return False
    if event in ANYWHERE:
        return True
    if imports:
        return event == "exec" or (event == "compile" and _is_measured(args, measured))
    if caller.removeprefix(LIBRARY) not in WRITERS:
        return False
    if event == "exec":
        return True
    text = args[0] if isinstance(args[0], bytes) else b""
    if caller.endswith("typing.py"):
        plain = _ANNOTATION.fullmatch(text.decode("utf-8", "replace"))
        return plain is not None and not re.search(r"\b(lambda|for|if|await|yield)\b", plain[0])
    return not caller.endswith("dataclasses.py") or _named_plainly(frame)


def _is_measured(args: tuple[Any, ...], measured: dict[str, str]) -> bool:
    """Whether a compiled source is a library file, or a measured file with unchanged contents."""
    source, path = args[0], os.fsdecode(args[1])
    if path in measured:
        return bytes(source) == measured[path].encode("utf-8", "surrogateescape")
    return path.startswith((LIBRARY, "<frozen ")) or "/site-packages/" in path


def _named_plainly(frame: types.FrameType | None) -> bool:
    """Whether the class's field names, which dataclasses paste into source text, are identifiers."""
    while frame is not None and frame.f_code.co_filename.endswith("dataclasses.py"):
        fields = getattr(frame.f_locals.get("cls"), "__annotations__", {})
        if not all(type(name) is str and name.isidentifier() for name in fields):
            return False
        frame = frame.f_back
    return True


PR_SET_DUMPABLE = 4
DEEPEST = 100
_DYING_S = 1.0


class JsonPacker:
    """Converts values to JSON: tuples and similar become lists, instances of subclasses their base value."""

    def __init__(self) -> None:
        self.deceit: str | None = None
        self._examined: set[type[Any]] = set()

    def pack(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON data. Raises NotPlain if it has no JSON form."""
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is float or kind is str:
            return value
        if depth > DEEPEST:
            raise NotPlain("something nested too deeply")
        if kind is list or kind is tuple or kind is deque or kind is range:
            return [self.pack(item, depth + 1) for item in value]
        if kind in (dict, OrderedDict, defaultdict, Counter):
            packed = {self.pack(key, depth + 1): self.pack(item, depth + 1) for key, item in value.items()}
            if any(type(key) is not str for key in packed):
                raise NotPlain("a dict with keys that are no strings")
            return packed
        return self.pack(self._carried(value, kind), depth + 1)

    def _carried(self, value: Any, kind: type[Any]) -> Any:
        if kind not in self._examined:
            self._examined.add(kind)
            if plain_values.deceives(value):
                self.deceit = kind.__name__
        if (plain := plain_values.as_json(value, kind)) is not None:
            return plain
        if plain_values.has_base(kind):
            return plain_values.base_value(value)
        if plain_values.is_object(value) or kind is SimpleNamespace:
            return plain_values.fields(value)
        raise NotPlain(kind.__name__)


def answer(function: Callable[[], Any], case: Any, *, typed: bool) -> str:
    """The entry point's result for one case, as JSON: a value, or the name of what went wrong.

    `typed`: arguments and result keep their Python types; otherwise they are JSON values.
    """
    crossing = Crossing(carry=True) if typed else JsonPacker()
    try:
        args, kwargs = case["args"], case["kwargs"]
        if typed:
            args, kwargs = Crossing().unpack([args, kwargs])
        value = function()(*args, **kwargs)
        outcome = {"value": crossing.pack(value)}
    except NotPlain as error:
        outcome = {"not_plain": str(error)}
    except BaseException as error:  # SystemExit and skips included: each is an answer to report
        outcome = {"raise": name_of(type(error))}
    return json.dumps(outcome if crossing.deceit is None else {"deceit": crossing.deceit[:LONGEST_NAME]})


class EntryPoint:
    """The entry point, imported on first use; a failure to import is raised each time."""

    def __init__(self, target: str, name: str) -> None:
        self._target, self._name = target, name
        self._function: Any = None
        self._error: BaseException | None = None

    def __call__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._function is None:
            try:
                self._function = getattr(load(ROOT, self._target), self._name)
            except BaseException as error:
                self._error = error
                raise
        return self._function


def in_fork(job: Any, cases: list[Any], seconds: int, channel: int, pipe: int) -> None:
    """Body of a fork; never returns."""
    status = 1
    try:
        os.setsid()
        os.close(channel)
        os.dup2(1, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        entry = EntryPoint(job["target"], job["entry"])
        forbidden = job.get("forbidden")
        refused = watch(ROOT, job["files"], forbidden) if forbidden is not None else []
        for case in cases:
            outcome = answer(entry, case, typed=job["typed"])
            if refused:
                outcome = json.dumps({"hidden_code": refused[0]})
            message = (job["token"] + outcome + "\n").encode()
            while message:
                message = message[os.write(pipe, message) :]
        status = 0
    finally:
        os._exit(status)


class LineReader:
    """Reads lines from a fork."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""

    def line(self, deadline: float) -> bytes | None:
        """Bytes up to the end of a line, the pipe's closing, or too much; None at the deadline."""
        data = self._rest
        while b"\n" not in data and len(data) <= LONGEST:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                self._rest = data
                return None
            piece = os.read(self._pipe, 65536)
            if not piece:
                break
            data += piece
        line, end, self._rest = data.partition(b"\n")
        return line + end


def next_line(reader: LineReader, pid: int, seconds: float) -> bytes | None:
    """`Ear.line`, or None after `seconds` in which the fork computed or slept.

    Time in which it waited for a processor does not count: results must not depend on the machine's load.
    """
    began, before = time.monotonic(), seconds_runnable(pid)
    while (deadline := began + seconds + seconds_runnable(pid) - before) > time.monotonic():
        data = reader.line(deadline)
        if data is not None:
            return data
    return None


def seconds_runnable(pid: int) -> float:
    """Seconds that a process was runnable without a processor; 0 if the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def end(pid: int) -> tuple[int, float]:
    """Kill the fork with its process group. Returns its wait status and CPU seconds."""
    gone, status, used = os.wait4(pid, os.WNOHANG)
    for kill, target in ((os.killpg, pid), (os.kill, pid)):
        with contextlib.suppress(OSError):
            kill(target, signal.SIGKILL)
    if not gone:
        gone, status, used = os.wait4(pid, 0)
    return status, used.ru_utime + used.ru_stime


def await_death(pid: int) -> None:
    """After the pipe closed: give a dying process time to exit, so that its status is known."""
    until = time.monotonic() + _DYING_S
    while time.monotonic() < until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.002)


def parse_report(job: Any, data: bytes) -> dict[str, Any]:
    """The report in a line."""
    text = data.decode("utf-8", "replace")
    if not text.startswith(job["token"]) or not text.endswith("\n"):
        return {"too_long": len(data)} if len(data) > LONGEST else {"forged": text[:80]}
    try:
        return read(text[len(job["token"]) :])
    except Malformed:
        return {"forged": text[len(job["token"]) :][:80]}


def ended(status: int, used: float, seconds: int) -> dict[str, Any]:
    """The report for a case whose fork ended without an answer."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {"timeout": "cpu"} if number == signal.SIGXCPU or used >= seconds else {"signal": number}
    return {"exit": os.WEXITSTATUS(status)}


def run_fork(
    job: Any, cases: list[Any], seconds: int, channel: int
) -> Iterator[tuple[dict[str, Any], float]]:
    """Reports for these cases, up to the one that ends the fork, each with the CPU seconds so far."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(near)
        in_fork(job, cases, seconds, channel, far)
    os.close(far)
    reader = LineReader(near)
    reports: list[dict[str, Any]] = []
    for _ in cases:
        data = next_line(reader, pid, job["wall_seconds"])
        if data == b"":
            await_death(pid)
        if not data:
            break
        reports.append(parse_report(job, data))
        if reports[-1].keys() & {"forged", "too_long"}:
            break  # anything after it is no report
    os.close(near)
    status, used = end(pid)
    if len(reports) < len(cases) and not (reports and reports[-1].keys() & {"forged", "too_long"}):
        reports.append({"timeout": "wall"} if data is None else ended(status, used, seconds))
    for report in reports:
        yield report, used / len(reports)


def reports_of(job: Any, channel: int) -> Iterator[dict[str, Any]]:
    """One report for each case, in order. `cpu_seconds` limits each fork, and all cases that share one."""
    shared = job["fork"] == "run"
    cases, at, late, left = job["cases"], 0, 0, float(job["cpu_seconds"])
    while at < len(cases):
        if late >= job["patience"] or left <= 0:
            yield {"timeout": "skipped"}
            at += 1
            continue
        group = cases[at:] if shared else cases[at : at + 1]
        for report, used in run_fork(job, group, max(1, round(left)), channel):
            late += "timeout" in report
            left -= used if shared else 0
            at += 1
            yield report


def hide() -> None:
    """Keep forks from reading this process's memory and files through /proc."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.set_inheritable(channel, False)
    hide()

    def say(report: dict[str, Any]) -> None:
        os.write(channel, (job["nonce"] + json.dumps(report) + "\n").encode())

    write_files(ROOT, job["files"])
    say({"ready": True})
    for report in reports_of(job, channel):
        say(report)
    say({"done": True})
