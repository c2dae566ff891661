"""Pid 1 of a jail: puts up its layers, then runs one request after another.

Between requests the workspace stays and nothing else: every process is killed, /tmp and /dev/shm are emptied.
A runner waits, forked and warm, for the next request; init watches it, and alone tells the agent how it
ended: neither a program nor what it starts ever holds the socket that the agent listens on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
from typing import Any, NoReturn

from . import files, kernel, landlock, memory, message, overlay, runner, seccomp, usage, word
from .ending import end_everything, exit_status, kill_all

NAMESPACES = (
    kernel.NEWUSER | kernel.NEWPID | kernel.NEWNS | kernel.NEWNET
    | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
)  # fmt: skip
_UID_INSIDE = 1000
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
_WATCH_MS = 50
_CALM_MS = 5
"""after a request, without another: then there is time to make the next runner ready"""
KEPT = (kernel.CAP_DAC_OVERRIDE, kernel.CAP_DAC_READ_SEARCH, kernel.CAP_FOWNER, kernel.CAP_SETPCAP)
"""capabilities of trusted code over the jail's own files; a program gets none"""
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
    rehearse, received = plan["rehearse"], None
    while True:
        pid, report = _start_runner(control, rehearse=rehearse, received=received)
        if rehearse:
            _rehearse()
        control.sendall(word.encode(_supervise(pid, report, control)))
        end_everything(pid)
        for folder in SCRATCH:
            _empty(folder)
        received = _asked_soon(control)
        # who asks at once is answered at once, by a runner that has not rehearsed
        rehearse = received is None


def _asked_soon(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request, where it comes before there was time to prepare for it."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while poll.poll(_CALM_MS):
        received = message.receive(control)
        if received is None:
            os._exit(0)  # the agent hung up
        request, fds = received
        if request["op"] == "pack" and _pack_small(fds):
            control.sendall(word.encode(word.Outcome(exit_code=0)))
        elif request["op"] != "kill":  # one that came too late
            return received
    return None


def _pack_small(fds: list[int]) -> bool:
    """Answer with the workspace what comes right after a run, without a process for it, if it is small."""
    try:
        packed = files.pack_small("/work")
    except OSError:
        return False  # a runner will see it too, and say so
    if packed is None:
        return False
    with contextlib.suppress(BrokenPipeError), open(fds[0], "wb", buffering=0) as out:
        while packed:
            packed = packed[out.write(packed) :]
    os.close(fds[1])
    return True


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
        kernel.put("/proc/sys/user/max_user_namespaces", "0")
        kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND | kernel.MS_REC)
        kernel.set_mount_attributes("/proc/sys", kernel.ATTR_RDONLY)
    with kernel.layer("network_namespace"):
        _loopback_up()
    with kernel.layer("uts_namespace"):
        kernel.set_host_name("sandbox")
    with kernel.layer("capabilities"):
        kernel.keep_capabilities(*KEPT)
    with kernel.layer("rlimits"):
        # should the machine run out of memory, a jail goes first
        kernel.put("/proc/self/oom_score_adj", "1000")
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
        kernel.put(f"/proc/self/{name}", text)


def _loopback_up() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, get_flags, struct.pack("16sh22x", b"lo", 0))
        flags = struct.unpack("16sh22x", answer)[1]
        fcntl.ioctl(handle, set_flags, struct.pack("16sh22x", b"lo", flags | up))


# ----------------------------------------------------------------------------------- requests


def _start_runner(
    control: socket.socket, *, rehearse: bool, received: tuple[dict[str, Any], list[int]] | None
) -> tuple[int, int]:
    """The pid of a runner, and a pipe on which it reports: what it began, then how far it came.

    It serves the request that was `received`, or else the next.
    """
    report_in, report_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(report_in)
            runner.main(control, report_out, rehearse=rehearse, received=received)
        finally:
            os._exit(70)
    os.close(report_out)
    for fd in received[1] if received else ():
        os.close(fd)
    return pid, report_in


def _rehearse() -> None:
    """The fork left every page shared: take the steps of a request once, to no effect, while none is here."""
    report_in, report_out = os.pipe()
    os.write(report_out, runner.BEGAN.pack(runner.PYTHON, 1, 0.0))
    runner.BEGAN.unpack(os.read(report_in, runner.BEGAN.size))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poll = select.poll()
        for fd in (report_in, ours.fileno()):
            poll.register(fd, select.POLLIN)
        poll.poll(0)
        os.close(os.pidfd_open(os.getpid()))
        usage.of_one(os.getpid())
        theirs.sendall(word.encode(word.Outcome(exit_code=0)))
    os.close(report_in)
    os.close(report_out)


def _supervise(pid: int, report: int, control: socket.socket) -> word.Outcome:
    """Watch one runner until it is known how it ended. Never returns once the agent is gone.

    Python source says itself when it is done, so that nobody waits for its memory to be taken down. What it
    says is its exit code, which it may choose in any case; what it used is what the kernel counted.
    """
    began = os.read(report, runner.BEGAN.size)
    if len(began) < runner.BEGAN.size:
        os._exit(0)  # the agent hung up
    kind, memory_bytes, before = runner.BEGAN.unpack(began)
    ended = os.pidfd_open(pid)
    # what trusted code unpacks is the workspace, and not the program's
    watch = memory.Watch(memory_bytes, () if kind == runner.OPERATION else ("/work", *SCRATCH))
    oom, code = _watch(ended, report if kind == runner.PYTHON else None, control, watch)
    os.close(ended)
    used = usage.of_one(pid) if code is not None and not oom else None
    if used is not None:
        # what is left of it is killed once the word is out
        os.close(report)
        return word.Outcome(exit_code=code, cpu_s=max(0.0, used[0] - before), peak_bytes=used[1])
    status, cpu_s, peak = end_everything(pid)
    oom = oom or watch.killed_by_group(status, peak)
    exit_code, signal_number = (code, None) if code is not None and not oom else exit_status(status)
    refused = runner.refusal(os.read(report, word.SIZE)) if kind == runner.OPERATION else None
    os.close(report)
    return word.Outcome(exit_code, signal_number, oom, max(0.0, cpu_s - before), peak, refused)


def _watch(
    ended: int, report: int | None, control: socket.socket, watch: memory.Watch
) -> tuple[bool, int | None]:
    """Wait for the runner to end, or to be done; kill all when asked to or when memory ran out.

    Whether it was memory, and the exit code of a runner that said it was done.
    """
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)
    if report is not None:
        poll.register(report, select.POLLIN)
    oom = False
    while True:
        events = {fd for fd, _ in poll.poll(_WATCH_MS)}
        if report is not None and report in events:
            # one byte, if it is ours; the program may have written anything
            if len(said := os.read(report, 2)) == 1:
                return oom, said[0]
            poll.unregister(report)
            report = None
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


def _empty(folder: str) -> None:
    if os.listdir(folder):
        files.clear(folder)
    os.chmod(folder, 0o1777)
