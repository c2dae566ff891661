"""Runs inside the jail: finds the first call on which each mutant of a solution differs from it.

A forked worker has the files in memory, runs every call on the solution, then runs the mutants one by one and
reports each at once. A mutant that kills the worker counts as different, and a new worker continues after it.
Standard library only: the text of this file is the program that the jail runs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

CPU_SECONDS = 8
"""processor time of one worker"""
LEAST_PATIENCE = 0.05
"""smallest limit of processor time for one call of a mutant, seconds"""


class CallTimeout(BaseException):
    """A call exceeded its time limit."""


class MemoryImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, files: dict[str, str]) -> None:
        own = [name for name in files if name.endswith(".py")]
        self.modules = {name[:-3].removesuffix("/__init__").replace("/", "."): name for name in own}
        self.files = files
        self.code: dict[tuple[str, str], Any] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        inside = any(name.startswith(fullname + ".") for name in self.modules)
        if fullname not in self.modules:
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True) if inside else None
        origin = self.modules[fullname]
        return importlib.util.spec_from_loader(fullname, self, origin=origin, is_package=inside)

    def exec_module(self, module: Any) -> None:
        name = self.modules[module.__name__]
        key = (name, self.files[name])
        if key not in self.code:
            self.code[key] = compile(self.files[name], name, "exec")
        exec(self.code[key], module.__dict__)

    def forget(self) -> None:
        for name in self.modules:
            for part in (name, name.split(".")[0]):
                sys.modules.pop(part, None)


def plain(value: Any) -> str:
    """A value as text, equal for equal values of equal types."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__name__} {str(value)[:200]}"


def attempt(function: Any, call: Any, patience: float) -> str:
    """The result of a call as text; exceptions and CallTimeout are results too."""
    args, kwargs = copy.deepcopy((call["args"], call["kwargs"]))
    signal.setitimer(signal.ITIMER_VIRTUAL, patience)
    try:
        return "=" + plain(function(*args, **kwargs))
    except BaseException as error:  # any exception of a mutant is a result
        return "!" + type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def load(job: Any, files: MemoryImporter) -> Any:
    files.forget()
    signal.setitimer(signal.ITIMER_VIRTUAL, 2.0)
    try:
        module = importlib.import_module(job["module"])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    function: Any = module
    for part in job["entry"].split("."):
        function = getattr(function, part)
    return function


def run_mutants(job: Any, first: int, pipe: int) -> None:

    def say(report: Any) -> None:
        os.write(pipe, (json.dumps(report) + "\n").encode())

    def late(number: int, frame: Any) -> None:
        raise CallTimeout

    signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    texts = dict(job["files"])
    files = MemoryImporter(texts)
    sys.meta_path.insert(0, files)
    function = load(job, files)
    started = time.process_time()
    arguments = job["calls"]
    right = [attempt(function, call, 2.0) for call in arguments]
    patience = max(LEAST_PATIENCE, 20 * (time.process_time() - started))
    # further inputs on which the solution itself fails are outside its domain
    calls = [n for n in range(len(arguments)) if n < job["hidden"] or right[n].startswith("=")]
    if first == 0:
        hidden = arguments[: job["hidden"]]
        again = [[attempt(function, call, 2.0) for call in hidden] for _ in range(job["times"] - 1)]
        say({"reference": [right[: job["hidden"]], *again]})
    for number in range(first, len(job["mutants"])):
        name, text = job["mutants"][number]
        texts[name], original = text, texts[name]
        try:
            function = load(job, files)
            at = next((n for n in calls if attempt(function, arguments[n], patience) != right[n]), None)
        except BaseException:  # it does not even load
            at = 0
        texts[name] = original
        say({"mutant": number, "at": at})
    os._exit(0)


def work(job: Any, channel: int) -> None:
    """Run workers one after the other until every mutant is reported."""
    first, reported = 0, 0
    while reported <= len(job["mutants"]):
        near, far = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                os.close(near)
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                run_mutants(job, first, far)
                status = 0
            finally:
                os._exit(status)
        os.close(far)
        lines = listen(near, time.monotonic() + 4 * CPU_SECONDS)
        os.close(near)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for line in lines:
            os.write(channel, line + b"\n")
        reported += len(lines)
        if reported <= len(job["mutants"]):
            if reported == 0:
                os.write(channel, b'{"broken": "the reference does not load or does not end"}\n')
                return
            os.write(channel, json.dumps({"mutant": reported - 1, "at": 0}).encode() + b"\n")
            reported += 1
        first = reported - 1


def listen(pipe: int, deadline: float) -> list[bytes]:
    """Read complete lines until the pipe is closed or the deadline has passed."""
    data = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        piece = os.read(pipe, 65536)
        if not piece:
            break
        data += piece
    return data.split(b"\n")[:-1]


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    work(job, channel)


main()
