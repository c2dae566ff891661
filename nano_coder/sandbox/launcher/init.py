"""Pid 1 of a jail: puts up its layers, then runs one request after another.

Between requests the workspace stays and nothing else: every process is killed, /tmp and /dev/shm are emptied.
A runner waits, forked and warm, for the next request; init watches it, and alone reports how it ended.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import select
import signal
import socket
import struct
from typing import Any, NoReturn

from . import files, kernel, landlock, memory, message, overlay, runner, seccomp
from .ending import end_everything, kill_all, outcome

NAMESPACES = (
    kernel.NEWUSER | kernel.NEWPID | kernel.NEWNS | kernel.NEWNET
    | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
)  # fmt: skip
_UID_INSIDE = 1000
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
_WATCH_MS = 50
DONE = "=BdQ"
"""exit code, seconds of processor time, largest resident set"""
_LONGEST_WORD = 256
KEPT = (kernel.CAP_DAC_OVERRIDE, kernel.CAP_DAC_READ_SEARCH, kernel.CAP_FOWNER, kernel.CAP_SETPCAP)
"""capabilities of trusted code over the jail's own files; a program gets none"""
_PROGRAMS = ("run", "python")
SCRATCH = ("/tmp", "/dev/shm")


def main(control: socket.socket, plan: dict[str, Any]) -> NoReturn:
    close_all_but({control.fileno(), 2, *({plan["events"]} - {-1})})
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        """Standard streams are taken, so that no pipe of ours becomes one."""
    os.close(null)
    try:
        _isolate(plan)
    except kernel.LayerError as error:
        message.send(control, error.record())
        os._exit(0)
    if plan["listen"]:
        # for the agent to accept on: the only way out, and it ends in the agent
        with socket.create_server(("127.0.0.1", plan["listen"])) as listener:
            message.send(control, {"ready": True}, [listener.fileno()])
    else:
        message.send(control, {"ready": True})
    rehearse = plan["rehearse"]
    while True:
        pid, report = _start_runner(control, rehearse=rehearse)
        if rehearse:
            _rehearse()
        op, told = _supervise(pid, report, control)
        # what follows a file operation follows at once
        rehearse = op in _PROGRAMS
        message.send(control, told)
        end_everything(pid)
        for folder in SCRATCH:
            _empty(folder)


def close_all_but(kept: set[int]) -> None:
    low = 0
    for fd in [*sorted(kept), 1 << 20]:
        # an empty range that begins at 0 would close everything
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1


# ------------------------------------------------------------------------------------- layers


def _isolate(plan: dict[str, Any]) -> None:
    # first, so that a dead parent leaves no init behind
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with kernel.layer("user_namespace"):
        map_one_user(_UID_INSIDE, plan["uid"], plan["gid"])
    with kernel.layer("mount_namespace"):
        work = f"size={plan['work_bytes']},nr_inodes={plan['work_inodes']},mode=755"
        kernel.mount("tmpfs", "/work", "tmpfs", _QUIET, f"{work},uid={_UID_INSIDE},gid={_UID_INSIDE}")
        for target, megabytes in zip(SCRATCH, (plan["tmp_mb"], 64), strict=True):
            options = f"size={megabytes}m,nr_inodes=65536,mode=1777"
            kernel.mount("tmpfs", target, "tmpfs", _QUIET, options)
    if plan["base"]:
        with kernel.layer("overlay"):
            overlay.lay(plan["base"])
    with kernel.layer("proc"):
        kernel.mount("proc", "/proc", "proc", _QUIET | kernel.MS_NOEXEC)
        # a second wall behind seccomp: no user namespace below this one
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND | kernel.MS_REC)
        kernel.set_mount_attributes("/proc/sys", kernel.ATTR_RDONLY)
    with kernel.layer("network_namespace"):
        _loopback_up()
    with kernel.layer("uts_namespace"):
        kernel.set_host_name("sandbox")
    with kernel.layer("capabilities"):
        kernel.keep_capabilities(*KEPT)
    with kernel.layer("rlimits"), open("/proc/self/oom_score_adj", "w") as badness:
        # should the machine run out of memory, a jail goes first
        badness.write("1000")
    with kernel.layer("no_new_privs"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    memory.open_counters(plan["events"])
    if landlock.version():
        with kernel.layer("landlock"):
            landlock.confine(writable=("/work", *SCRATCH))
    program = seccomp.program(kernel.MACHINE)
    if program is not None:
        with kernel.layer("seccomp"):
            kernel.install_filter(program)


def map_one_user(inside: int, uid: int, gid: int) -> None:
    """Make `uid` and `gid` of the parent namespace `inside` in ours."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _loopback_up() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, get_flags, struct.pack("16sh22x", b"lo", 0))
        flags = struct.unpack("16sh22x", answer)[1]
        fcntl.ioctl(handle, set_flags, struct.pack("16sh22x", b"lo", flags | up))


# ----------------------------------------------------------------------------------- requests


def _start_runner(control: socket.socket, *, rehearse: bool) -> tuple[int, int]:
    """The pid of a runner, and a pipe on which it reports one JSON object a line."""
    report_in, report_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(report_in)
            runner.main(control, report_out, rehearse=rehearse)
        finally:
            os._exit(70)
    os.close(report_out)
    return pid, report_in


def _rehearse() -> None:
    """The fork left every page shared: take the steps of a request once, to no effect, while none is here."""
    report_in, report_out = os.pipe()
    os.write(report_out, b'{"memory_bytes": 1}\n' + struct.pack(DONE, 0, 0.0, 0))
    os.close(report_out)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(report_in, "rb", buffering=0) as told:
        json.loads(_line(told))
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        poll.poll(0)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        message.send(
            theirs, {**outcome(0, 0.0, 0, oom=False), "done": _done(told.read(_LONGEST_WORD) or b"")}
        )
        message.receive(ours)


def _supervise(pid: int, report: int, control: socket.socket) -> tuple[str, dict[str, Any]]:
    """Watch one runner to its end, then end whatever it left behind: what was asked, and the outcome.

    Never returns once the agent is gone.

    Python source says itself when it is done, so that nobody waits for its memory to be taken down. What it
    says is its own exit code, which it may choose in any case; nothing else of it is believed.
    """
    with open(report, "rb", buffering=0) as told:
        began = json.loads(_line(told))
        ended = os.pidfd_open(pid)
        watch = memory.Watch(began["memory_bytes"], ("/work", *SCRATCH))
        oom, done = _watch(ended, told if began["op"] == "python" else None, control, watch)
        os.close(ended)
        if done is not None and not oom:
            kill_all()
            return began["op"], done
        status, used, peak = end_everything(pid)
        told_of = outcome(status, used, peak, oom=oom or watch.killed_by_group(status, peak))
        if began["op"] not in _PROGRAMS:
            for line in told.readlines():
                told_of.update(json.loads(line))
    return began["op"], told_of


def _line(told: io.FileIO) -> bytes:
    """The first line of a runner, byte by byte: what follows it belongs to the end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = told.read(1)
        if not byte:
            os._exit(0)  # the agent hung up
        line += byte
    return line


def _watch(
    ended: int, told: io.FileIO | None, control: socket.socket, watch: memory.Watch
) -> tuple[bool, dict[str, Any] | None]:
    """Wait for the runner to end, or to be done; kill all when asked to or when memory ran out.

    Whether it was memory, and the outcome of a runner that said it was done.
    """
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)
    if told is not None:
        poll.register(told, select.POLLIN)
    oom = False
    while True:
        events = {fd for fd, _ in poll.poll(_WATCH_MS)}
        if told is not None and told.fileno() in events:
            if (done := _done(told.read(_LONGEST_WORD) or b"")) is not None:
                return oom, done
            poll.unregister(told)
            told = None
        elif ended in events:
            return oom, None
        elif events:
            if message.receive(control) is None:
                os._exit(0)
            watch.stopped = True
            kill_all()
        elif not oom and watch.exceeded():
            oom = True
            kill_all()


def _done(word: bytes) -> dict[str, Any] | None:
    """The outcome that a Python program claims, if it is one; the program may have written anything."""
    try:
        code, used, peak = struct.unpack(DONE, word)
    except struct.error:
        return None
    if not (0 <= used < 1e9 and peak < 1 << 62):
        return None
    return {**outcome(0, used, peak, oom=False), "exit_code": code}


def _empty(folder: str) -> None:
    if os.listdir(folder):
        files.clear(folder)
    os.chmod(folder, 0o1777)
