"""Calls the entry point on one case after the other in forks, and reports values.

This process never imports the artifact. A fork loses the channel to the grader before it imports the
artifact, and answers through a pipe; so an exit, a hang or a mutated global ends what runs in one fork. No
expected value is ever here, so that nothing in here is worth stealing, and a forged answer has to be right.

`fork` says what shares a fork: "case" gives each case one of its own; "run" lets cases follow each other in
one, as they do in a test script, until one of them ends it, and goes on behind that one in another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from . import plain_values
from .artifact import ROOT, load, write_files
from .report import LONGEST, LONGEST_NAME, Malformed, name_of, read
from .source_guard import watch
from .value_codec import Crossing, NotPlain

PR_SET_DUMPABLE = 4
DEEPEST = 100
_DYING_S = 1.0


class Json:
    """Values as JSON has them: a tuple and its like are a list, a subclass is its base value."""

    def __init__(self) -> None:
        self.deceit: str | None = None
        self._examined: set[type[Any]] = set()

    def pack(self, value: Any, depth: int = 0) -> Any:
        """Raises NotPlain for what JSON has no form for."""
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
    """What the entry point does with one case, as JSON: a value, or the name of what went wrong.

    `typed` values cross with their types kept, both ways; others are those of JSON.
    """
    crossing = Crossing(carry=True) if typed else Json()
    try:
        args, kwargs = case["args"], case["kwargs"]
        if typed:
            args, kwargs = Crossing().unpack([args, kwargs])
        value = function()(*args, **kwargs)
        told = {"value": crossing.pack(value)}
    except NotPlain as error:
        told = {"not_plain": str(error)}
    except BaseException as error:  # SystemExit and skips included: each is an answer to report
        told = {"raise": name_of(type(error))}
    return json.dumps(told if crossing.deceit is None else {"deceit": crossing.deceit[:LONGEST_NAME]})


class Entry:
    """The entry point, loaded when it is first asked for; a failure to load is the same each time."""

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
    """The life of one fork; never returns."""
    status = 1
    try:
        os.setsid()
        os.close(channel)
        os.dup2(1, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        entry = Entry(job["target"], job["entry"])
        forbidden = job.get("forbidden")
        refused = watch(ROOT, job["files"], forbidden) if forbidden is not None else []
        for case in cases:
            told = answer(entry, case, typed=job["typed"])
            if refused:
                told = json.dumps({"hidden_code": refused[0]})
            message = (job["token"] + told + "\n").encode()
            while message:
                message = message[os.write(pipe, message) :]
        status = 0
    finally:
        os._exit(status)


class Ear:
    """Lines from a fork."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""

    def line(self, deadline: float) -> bytes | None:
        """What comes up to a line's end, the pipe's closing or too much, or the deadline (then None)."""
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


def next_line(ear: Ear, pid: int, seconds: float) -> bytes | None:
    """`Ear.line`, or None after so many seconds in which the fork computed or slept.

    What it waited for a processor is not its doing: the same program passes on a machine that is busy.
    """
    began, before = time.monotonic(), kept_waiting(pid)
    while (deadline := began + seconds + kept_waiting(pid) - before) > time.monotonic():
        data = ear.line(deadline)
        if data is not None:
            return data
    return None


def kept_waiting(pid: int) -> float:
    """Seconds that a process was ready to run and had no processor; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat") as told:
            return int(told.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def end(pid: int) -> tuple[int, float]:
    """Kill the fork with its group; its wait status and the seconds of processor time that it used."""
    gone, status, used = os.wait4(pid, os.WNOHANG)
    for kill, target in ((os.killpg, pid), (os.kill, pid)):
        with contextlib.suppress(OSError):
            kill(target, signal.SIGKILL)
    if not gone:
        gone, status, used = os.wait4(pid, 0)
    return status, used.ru_utime + used.ru_stime


def let_die(pid: int) -> None:
    """The pipe is closed: let a dying process tell its status before it is killed."""
    until = time.monotonic() + _DYING_S
    while time.monotonic() < until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.002)


def heard(job: Any, data: bytes) -> dict[str, Any]:
    """The report that a line holds."""
    text = data.decode("utf-8", "replace")
    if not text.startswith(job["token"]) or not text.endswith("\n"):
        return {"too_long": len(data)} if len(data) > LONGEST else {"forged": text[:80]}
    try:
        return read(text[len(job["token"]) :])
    except Malformed:
        return {"forged": text[len(job["token"]) :][:80]}


def ended(status: int, used: float, seconds: int) -> dict[str, Any]:
    """The report of a case whose fork ended without an answer."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {"timeout": "cpu"} if number == signal.SIGXCPU or used >= seconds else {"signal": number}
    return {"exit": os.WEXITSTATUS(status)}


def run_fork(
    job: Any, cases: list[Any], seconds: int, channel: int
) -> Iterator[tuple[dict[str, Any], float]]:
    """Reports of these cases, up to the one that ends the fork, and the processor time of each."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(near)
        in_fork(job, cases, seconds, channel, far)
    os.close(far)
    ear = Ear(near)
    reports: list[dict[str, Any]] = []
    for _ in cases:
        data = next_line(ear, pid, job["wall_seconds"])
        if data == b"":
            let_die(pid)
        if not data:
            break
        reports.append(heard(job, data))
        if reports[-1].keys() & {"forged", "too_long"}:
            break  # whatever follows is no report
    os.close(near)
    status, used = end(pid)
    if len(reports) < len(cases) and not (reports and reports[-1].keys() & {"forged", "too_long"}):
        reports.append({"timeout": "wall"} if data is None else ended(status, used, seconds))
    for report in reports:
        yield report, used / len(reports)


def reports_of(job: Any, channel: int) -> Iterator[dict[str, Any]]:
    """One report a case, in order. `cpu_seconds` are those of one fork, and of all where cases share one."""
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
