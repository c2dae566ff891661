"""Runs one program in a jail whose pid 1 is not ours, as under bubblewrap: rlimits, watch, and a report.

A foreign pid 1 reports a signal as an exit code above 128, which a program can return itself, and it measures
neither memory nor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from typing import Any, NoReturn

from . import cgroup, exec_program, files, kernel, memory, seccomp
from .exec_program import end_everything, kill_all, outcome

WRITABLE = ("/work", files.STATE, "/tmp", "/dev/shm")


def as_init() -> NoReturn:
    """As pid 1 of a container, with descriptors 3 to 7: request, channel to the agent, and the program's
    standard streams. The agent learns our pid from the first byte, and answers when it holds it."""
    for target, given in enumerate((5, 6, 7)):
        os.dup2(given, target)
    os.write(4, b"\n")
    if os.read(4, 1) == b"1":
        main(3, 4, 4)
    os._exit(0)


def main(request_fd: int, report: int, stop: int) -> None:
    """Run the request in the file `request_fd`; a byte on `stop` kills it; `report` gets JSON objects, one a
    line."""
    with open(request_fd, "rb") as file:
        request = json.load(file)
    # if memory runs out, the program is killed first; opened while /proc/self is still ours
    badness = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    usual = os.read(badness, 8)
    os.write(badness, b"1000")
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    memory.open_counters(cgroup.JailCgroup(events=_kills_of_our_group()))
    _report(report, {"began": True})
    pid = os.fork()
    if pid == 0:
        try:
            _exec_program(request)
        finally:
            os._exit(126)
    os.pwrite(badness, usual, 0)
    oom = _watch(os.pidfd_open(pid), stop, request["memory_bytes"])
    status, used, peak = end_everything(pid)
    _report(report, outcome(status, used, peak, oom=oom))


def _kills_of_our_group() -> int:
    """The file that counts kills in a container's control group, opened; -1 where it has none."""
    for path in ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _report(report: int, record: dict[str, object]) -> None:
    os.write(report, json.dumps(record).encode() + b"\n")


def _exec_program(request: dict[str, Any]) -> NoReturn:
    # a session of its own: a program that signals its process group must not reach us
    os.setsid()
    os.closerange(3, 1 << 20)
    if kernel.landlock_version():
        kernel.confine(writable=WRITABLE)
    program = seccomp.program(kernel.MACHINE)
    if program is not None:
        kernel.install_filter(program)
    exec_program.limit(request["rlimits"])
    files.lay_links()
    exec_program.reset_signals()
    exec_program.execute(request["argv"], request["env"])


def _watch(ended: int, stop: int, memory_bytes: int) -> bool:
    """Wait for the program to end; kill everything when asked to or out of memory. True if it was memory."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(stop, select.POLLIN)
    # only in-memory file systems: the workspace is on a disk
    oom, watch = False, memory.MemoryWatch(memory_bytes, WRITABLE[2:])
    while True:
        events = {fd for fd, _ in poll.poll(watch.pause_s * 1000)}
        if ended in events:
            return oom
        if events:
            kill_all()
            poll.unregister(stop)
        elif not oom and watch.exceeded():
            oom = True
            kill_all()
