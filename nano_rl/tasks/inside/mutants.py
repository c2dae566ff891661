"""Runs inside the jail: which mutants of a solution differ from it on which calls.

A worker fork holds the files in memory, answers every call with the reference, then tries one mutant after
the other and tells of each at once; where a mutant takes the worker down, it counts as told apart and a new
worker goes on behind it. Standard library only: the text of this file is the program that the jail runs.
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
"""of one worker"""
LEAST_PATIENCE = 0.05
"""seconds of processor time that a mutant gets for one call at least"""


class Late(BaseException):
    """A call used up its time."""


class Files(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from texts in memory."""

    def __init__(self, files: dict[str, str]) -> None:
        self.modules = {
            name[:-3].removesuffix("/__init__").replace("/", "."): name
            for name in files
            if name.endswith(".py")
        }
        self.files = files
        self.code: dict[tuple[str, str], Any] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        inside = any(name.startswith(fullname + ".") for name in self.modules)
        if fullname not in self.modules:
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True) if inside else None
        return importlib.util.spec_from_loader(
            fullname, self, origin=self.modules[fullname], is_package=inside
        )

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
    """A text that is equal for equal values of equal types."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__name__} {str(value)[:200]}"


def attempt(function: Any, call: Any, patience: float) -> str:
    """What a call gives, as text; Late and exceptions are results too."""
    args, kwargs = copy.deepcopy((call["args"], call["kwargs"]))
    signal.setitimer(signal.ITIMER_VIRTUAL, patience)
    try:
        return "=" + plain(function(*args, **kwargs))
    except BaseException as error:  # whatever a mutant does is an answer
        return "!" + type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def load(job: Any, files: Files) -> Any:
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


def survey(job: Any, first: int, pipe: int) -> None:
    """The life of one worker: mutants from `first` on."""

    def say(report: Any) -> None:
        os.write(pipe, (json.dumps(report) + "\n").encode())

    def late(number: int, frame: Any) -> None:
        raise Late

    signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    texts = dict(job["files"])
    files = Files(texts)
    sys.meta_path.insert(0, files)
    function = load(job, files)
    started = time.process_time()
    asked = job["calls"]
    right = [attempt(function, call, 2.0) for call in asked]
    patience = max(LEAST_PATIENCE, 20 * (time.process_time() - started))
    # where the reference itself fails beyond the hidden cases, an input was none of its domain
    calls = [n for n in range(len(asked)) if n < job["hidden"] or right[n].startswith("=")]
    if first == 0:
        hidden = asked[: job["hidden"]]
        again = [[attempt(function, call, 2.0) for call in hidden] for _ in range(job["times"] - 1)]
        say({"reference": [right[: job["hidden"]], *again]})
    for number in range(first, len(job["mutants"])):
        name, text = job["mutants"][number]
        texts[name], original = text, texts[name]
        try:
            function = load(job, files)
            at = next((n for n in calls if attempt(function, asked[n], patience) != right[n]), None)
        except BaseException:  # it does not even load
            at = 0
        texts[name] = original
        say({"mutant": number, "at": at})
    os._exit(0)


def work(job: Any, channel: int) -> None:
    """Workers one after the other until every mutant is told of."""
    first, told = 0, 0
    while told <= len(job["mutants"]):
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
                survey(job, first, far)
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
        told += len(lines)
        if told <= len(job["mutants"]):
            if told == 0:
                os.write(channel, b'{"broken": "the reference does not load or does not end"}\n')
                return
            os.write(channel, json.dumps({"mutant": told - 1, "at": 0}).encode() + b"\n")
            told += 1
        first = told - 1


def listen(pipe: int, deadline: float) -> list[bytes]:
    """Whole lines until the pipe is closed or time is up."""
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
