"""Runs hidden cases: calls the entry point on each in a fork, and reports the values.

This process never imports the artifact. A fork gives up the channel to the grader before it imports the
artifact, and answers through a pipe, so an exit, a hang or a changed global affects one fork only. No
expected value is in this jail: there is nothing to steal, and a forged answer has to be right.

With bounds on the source, an audit hook refuses code that
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
from types import SimpleNamespace
from typing import Any

from . import plain_values
from .plain_values import NotPlain
from .report import LONGEST, LONGEST_NAME, ROOT, Malformed, load, name_of, read, write_files

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


def answer(target: str, entry: str, case: Any) -> str:
    """The entry point's result for one case, as JSON: a value, or the name of what went wrong."""
    packer = JsonPacker()
    try:
        value = getattr(load(ROOT, target), entry)(*case["args"], **case["kwargs"])
        outcome = {"value": packer.pack(value)}
    except NotPlain as error:
        outcome = {"not_plain": str(error)}
    except BaseException as error:  # SystemExit and skips included: each is an answer to report
        outcome = {"raise": name_of(type(error))}
    return json.dumps(outcome if packer.deceit is None else {"deceit": packer.deceit[:LONGEST_NAME]})


def in_fork(job: Any, case: Any, channel: int, pipe: int) -> None:
    """Body of a fork; never returns."""
    status = 1
    try:
        os.setsid()
        os.close(channel)
        os.dup2(1, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 1))
        forbidden = job.get("forbidden")
        refused = watch(ROOT, job["files"], forbidden) if forbidden is not None else []
        outcome = answer(job["target"], job["entry"], case)
        if refused:
            outcome = json.dumps({"hidden_code": refused[0]})
        message = (job["token"] + outcome + "\n").encode()
        while message:
            message = message[os.write(pipe, message) :]
        status = 0
    finally:
        os._exit(status)


def read_line(pipe: int, pid: int, seconds: float) -> bytes | None:
    """Bytes up to the end of a line, the pipe's closing, or too much; None after `seconds` in which the fork
    computed or slept.

    Time in which it waited for a processor does not count: results must not depend on the machine's load.
    """
    data, began, before = b"", time.monotonic(), seconds_runnable(pid)
    while b"\n" not in data and len(data) <= LONGEST:
        left = began + seconds + seconds_runnable(pid) - before - time.monotonic()
        if left <= 0:
            return None
        if not select.select([pipe], [], [], left)[0]:
            continue
        piece = os.read(pipe, 65536)
        if not piece:
            break
        data += piece
    return data[: data.index(b"\n") + 1] if b"\n" in data else data


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


def report_on(job: Any, case: Any, channel: int) -> dict[str, Any]:
    """The report of one case, which runs in a fork of its own."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(near)
        in_fork(job, case, channel, far)
    os.close(far)
    data = read_line(near, pid, job["wall_seconds"])
    if data == b"":
        await_death(pid)
    os.close(near)
    status, used = end(pid)
    if data:
        return parse_report(job, data)
    return {"timeout": "wall"} if data is None else ended(status, used, job["cpu_seconds"])


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
    late = 0
    for case in job["cases"]:
        report = {"timeout": "skipped"} if late >= job["patience"] else report_on(job, case, channel)
        late += "timeout" in report
        say(report)
    say({"done": True})
