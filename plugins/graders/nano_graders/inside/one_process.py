"""Runs tests beside the solution in one hardened, supervised process, for suites that need live objects.

The supervisor never imports the solution; it forks the process that does, reads its reports from a pipe and
passes them on. The test runner is imported before the solution, whose folder comes last on sys.path; test
files are written outside the workspace after the solution is imported, and removed after collection. What
this cannot prevent is listed in docs/security.md.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import types
from typing import Any, NoReturn

from nano_coder.grading.inside.report import ROOT, Malformed, load, name_of, read, write_files

from .framework_runners import RUNNERS, count_every_end

PR_SET_DUMPABLE = 4
_WATCHED = ("unittest", "_pytest", "pytest", "pluggy", "doctest", "inside", "json")


def main(nonce: str) -> None:
    job = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    os.set_inheritable(channel, False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    _preload(job["framework"])
    write_files(ROOT, job["files"])

    def say(report: dict[str, Any]) -> None:
        os.write(channel, (nonce + json.dumps(report) + "\n").encode())

    say({"ready": True})
    token = secrets.token_hex(16)
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(near)
        os.close(channel)
        _in_fork(job, far, token)
    os.close(far)
    with open(near, "rb", closefd=True) as pipe:
        for line in pipe:
            text = line.decode("utf-8", "replace")
            say(_heard(text, token))
    _, status, used = os.wait4(pid, 0)
    seconds = used.ru_utime + used.ru_stime
    how = {"exit": os.WEXITSTATUS(status)} if os.WIFEXITED(status) else {"signal": os.WTERMSIG(status)}
    say({"ended": how, "cpu_s": seconds})


def _heard(line: str, token: str) -> dict[str, Any]:
    """The report in a line of the fork; fields that only the supervisor may set are dropped."""
    if line.startswith(token):
        with contextlib.suppress(Malformed):
            report = read(line[len(token) :])
            if not report.keys() & {"ready", "ended", "cpu_s"}:
                return report
    return {"forged": line[:80]}


def _preload(framework: str) -> None:
    """Import the test runner before the solution can shadow a part of it."""
    import decimal
    import difflib
    import doctest
    import unittest.mock

    del decimal, difflib, doctest, unittest
    count_every_end()
    if framework == "pytest":
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        import pytest

        del pytest


def _in_fork(job: dict[str, Any], pipe: int, token: str) -> NoReturn:
    """The process that tests and solution share."""
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 2)
        seconds = int(job["cpu_seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _run(job, pipe, token)
        status = 0
    finally:
        os._exit(status)


def _run(job: dict[str, Any], pipe: int, token: str, write: Any = os.write, dumps: Any = json.dumps) -> None:
    """Import the solution, then run the tests; report each check, and replaced functions."""

    def say(report: dict[str, Any]) -> None:
        write(pipe, (token + dumps(report) + "\n").encode())

    counted: list[str] = []

    def check(name: str, state: str) -> None:
        counted.append(name)
        say({"check": name, "state": state})

    folder = tempfile.mkdtemp()
    before = fingerprint()
    try:
        module = load(ROOT, job["target"])
    except BaseException as error:  # whatever the solution raises when it is imported
        say({"import": name_of(type(error))})
        say({"done": 0, "patched": []})
        return
    patched = changed(before, fingerprint())
    write_files(folder, job["tests"])
    sys.path.insert(0, folder)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = ROOT  # a program that a test starts imports the solution too

    def announce(names: list[str]) -> None:
        for file in job["tests"]:
            os.unlink(os.path.join(folder, file))
        say({"collected": names})

    RUNNERS[job["framework"]](job["tests"], module, announce, check)
    os.chdir(ROOT)
    shutil.rmtree(folder, ignore_errors=True)
    patched += changed(before, fingerprint())
    say({"done": len(counted), "patched": sorted(set(patched))[:5]})


def fingerprint() -> dict[tuple[str, ...], int]:
    """Place -> identity of the code, for functions of the test runners and builtins."""
    found: dict[tuple[str, ...], int] = {
        ("builtins", name): id(member) for name, member in vars(builtins).items()
    }
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in _WATCHED:
            for key, member in list(vars(module).items()):
                if isinstance(member, types.FunctionType):
                    found[name, key] = id(member.__code__)
                elif isinstance(member, type) and member.__module__ == name:
                    for inner, method in list(vars(member).items()):
                        if isinstance(method, types.FunctionType):
                            found[name, key, inner] = id(method.__code__)
    return found


def changed(before: dict[tuple[str, ...], int], now: dict[tuple[str, ...], int]) -> list[str]:
    """Places whose function was replaced."""
    return [
        ".".join(place) for place, member in before.items() if place[-1] != "_" and now.get(place) != member
    ]
