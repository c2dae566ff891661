"""One program in a jail whose pid 1 is not ours: started within limits, watched, and told of how it ended.

A foreign pid 1 passes on a signal as an exit code above 128, which a program can return by itself; it also
counts neither memory nor time.
"""

from __future__ import annotations

import json
import os
import select
from typing import Any, NoReturn

from . import exec_program, group, kernel, landlock, memory, seccomp
from .termination import end_everything, kill_all, outcome

WRITABLE = ("/work", "/tmp", "/dev/shm")
_WATCH_MS = 50


def main(asked: int, report: int, stop: int) -> None:
    """Run what the file `asked` says; a byte on `stop` kills it; `report` gets JSON objects, one a line."""
    with open(asked, "rb") as file:
        request = json.load(file)
    # should the machine run out of memory, a jail goes first; while /proc/self is still ours to write
    with open("/proc/self/oom_score_adj", "w") as badness:
        badness.write("1000")
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    memory.open_counters(group.Programs())
    _tell(report, {"began": True})
    pid = os.fork()
    if pid == 0:
        try:
            _become(request)
        finally:
            os._exit(126)
    oom = _watch(os.pidfd_open(pid), stop, request["memory_bytes"])
    status, used, peak = end_everything(pid)
    _tell(report, outcome(status, used, peak, oom=oom))


def _tell(report: int, record: dict[str, object]) -> None:
    os.write(report, json.dumps(record).encode() + b"\n")


def _become(request: dict[str, Any]) -> NoReturn:
    # a group of its own: a program that signals its group must not reach us
    os.setsid()
    os.closerange(3, 1 << 20)
    if landlock.version():
        landlock.confine(writable=WRITABLE)
    program = seccomp.program(kernel.MACHINE)
    if program is not None:
        kernel.install_filter(program)
    exec_program.limit(request["rlimits"])
    exec_program.reset_signals()
    exec_program.execute(request["argv"], request["env"])


def _watch(ended: int, stop: int, memory_bytes: int) -> bool:
    """Wait for the program to end; kill all when asked to or when memory ran out. True when it was memory."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(stop, select.POLLIN)
    # the workspace is on a disk
    oom, watch = False, memory.Watch(memory_bytes, WRITABLE[1:])
    while True:
        events = {fd for fd, _ in poll.poll(_WATCH_MS)}
        if ended in events:
            return oom
        if events:
            kill_all()
            poll.unregister(stop)
        elif not oom and watch.exceeded():
            oom = True
            kill_all()
