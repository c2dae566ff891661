"""Runs inside the jail: calls the entry point, one fork a case, and reports plain values.

This process never imports the artifact. Each case gets a fork of its own, which loses the channel to the
grader before it imports the artifact, and answers through a pipe; so an exit, a hang or a mutated global
ends one case. No expected value is ever here, so that nothing in here is worth stealing, and a forged
answer has to be right. Standard library only: the text of this file is the program that the jail runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

PR_SET_DUMPABLE = 4
LONGEST = 1 << 20
DEEPEST = 100


class NotPlain(Exception):
    """A value that is no plain data."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value from exact builtin types only: a subclass is refused, a tuple becomes a list."""
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is str:
        return value
    if depth > DEEPEST:
        raise NotPlain("nested too deeply")
    if kind is list or kind is tuple:
        return [plain(item, depth + 1) for item in value]
    if kind is dict:
        if any(type(key) is not str for key in value):
            raise NotPlain("a dict with keys that are no strings")
        return {key: plain(item, depth + 1) for key, item in value.items()}
    raise NotPlain(kind.__name__)


def load(path: str) -> Any:
    """The artifact as a module. Its folder comes last on the path: it shadows nothing."""
    sys.path.append(os.path.dirname(path))
    name = os.path.basename(path).rsplit(".", 1)[0]
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def answer(job: Any, case: Any) -> str:
    """What the entry point does with one case, as JSON: a value, or the name of what went wrong."""
    try:
        function = getattr(load(job["path"]), job["entry"])
        value = function(*case["args"], **case["kwargs"])
        return json.dumps({"value": plain(value)})
    except NotPlain as error:
        return json.dumps({"not_plain": str(error)})
    except BaseException as error:  # SystemExit and skips included: each is an answer to report
        return json.dumps({"raise": type(error).__name__})


def in_fork(job: Any, case: Any, channel: int, pipe: int) -> None:
    """The life of one fork; never returns."""
    status = 1
    try:
        os.setsid()
        os.close(channel)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        seconds = job["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        told = answer(job, case)
        message = (job["token"] + told + "\n").encode()
        while message:
            message = message[os.write(pipe, message) :]
        status = 0
    finally:
        os._exit(status)


def listen(pipe: int, deadline: float) -> bytes | None:
    """What comes through the pipe up to the first line's end, its closing, or the deadline (then None)."""
    data = b""
    while b"\n" not in data and len(data) <= LONGEST:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        piece = os.read(pipe, 65536)
        if not piece:
            break
        data += piece
    return data


def end(pid: int) -> tuple[int, float]:
    """Kill the fork with its group; its wait status and the seconds of processor time that it used."""
    gone, status, used = os.wait4(pid, os.WNOHANG)
    for kill, target in ((os.killpg, pid), (os.kill, pid)):
        with contextlib.suppress(OSError):
            kill(target, signal.SIGKILL)
    if not gone:
        gone, status, used = os.wait4(pid, 0)
    return status, used.ru_utime + used.ru_stime


def judge(job: Any, data: bytes | None, status: int, used: float) -> dict[str, Any]:
    """The report of one case."""
    if data is None:
        return {"timeout": "wall"}
    text = data.decode("utf-8", "replace")
    if not text:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            late = number == signal.SIGXCPU or used >= job["cpu_seconds"]
            return {"timeout": "cpu"} if late else {"signal": number}
        return {"exit": os.WEXITSTATUS(status)}
    if not text.startswith(job["token"]) or not text.endswith("\n"):
        return {"too_long": len(data)} if len(data) > LONGEST else {"forged": text[:80]}
    try:
        return dict(json.loads(text[len(job["token"]) :]))
    except ValueError:
        return {"forged": text[len(job["token"]) :][:80]}


def run_case(job: Any, case: Any, channel: int) -> dict[str, Any]:
    """Fork, listen, and end the fork."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(near)
        in_fork(job, case, channel, far)
    os.close(far)
    data = listen(near, time.monotonic() + job["wall_seconds"])
    if data == b"":
        # the pipe is closed: let a dying process tell its status before it is killed
        until = time.monotonic() + 1.0
        while (
            time.monotonic() < until
            and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        ):
            time.sleep(0.002)
    os.close(near)
    return judge(job, data, *end(pid))


def hide() -> None:
    """Keep forks from reading this process's memory and files through /proc."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.set_inheritable(channel, False)
    hide()

    def say(report: dict[str, Any]) -> None:
        os.write(channel, (job["nonce"] + json.dumps(report) + "\n").encode())

    say({"ready": True})
    late = 0
    for case in job["cases"]:
        report = {"timeout": "skipped"} if late >= job["patience"] else run_case(job, case, channel)
        late += "timeout" in report
        say(report)
    say({"done": True})


main()
