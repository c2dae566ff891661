"""Pid 1 of a jail: puts up its layers, then runs one request after another.

Between requests the workspace stays and nothing else: every process is killed, /tmp and /dev/shm are emptied.
A runner waits, forked and warm, for the next request, which the agent gives it. Init watches it, and tells
the agent how it ended; no runner and no program ever holds the socket on which it does. Where Python source
is done before init has woken even once, the agent has heard so already.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
from typing import Any, NamedTuple, NoReturn

from . import (
    exec_program,
    files,
    group,
    kernel,
    landlock,
    memory,
    message,
    outcome_record,
    overlay,
    runner,
    seccomp,
)
from .termination import end_everything, exit_status

NAMESPACES = (
    kernel.NEWUSER | kernel.NEWPID | kernel.NEWNS | kernel.NEWNET
    | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
)  # fmt: skip
_UID_INSIDE = 1000
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
_CALM_MS = 5
"""after a request, without another: then there is time to make the next runner ready"""
SCRATCH = ("/tmp", "/dev/shm")
_OWN_LIMITS = {
    # a second wall behind seccomp: no user namespace below this one
    "max_user_namespaces": 0,
    # counted for the user of the host too, whose other programs want some
    "max_inotify_instances": 8,
    "max_inotify_watches": 4096,
}
"""settings of a user namespace in /proc/sys/user"""


def main(control: socket.socket, plan: dict[str, Any], programs: group.Programs) -> NoReturn:
    """`programs` is the control group that those of this jail enter."""
    exec_program.close_all_but({control.fileno(), 2, *programs} - {-1})
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        """Standard streams are taken, so that no pipe of ours becomes one."""
    os.close(null)
    try:
        _isolate(plan, programs)
    except kernel.LayerError as error:
        message.send(control, error.record())
        os._exit(0)
    timer, rehearse, number = kernel.make_timer(), plan["rehearse"], 0
    while True:
        runner, theirs = _start_runner(plan["rlimits"], timer, number, rehearse=rehearse)
        _announce(control, runner, theirs, plan["listen"])
        if rehearse:
            _rehearse(timer)
        end = _wait(runner, control)
        outcome = _ended(runner, end)
        if end.packing is None:
            control.sendall(outcome_record.encode(outcome))
        else:
            _pack(control, end.packing)
        _tidy(runner)
        # who asks at once is answered at once, by a runner that has not rehearsed
        rehearse = not _asked_soon(control)
        number += 1


def _announce(control: socket.socket, runner: Runner, theirs: list[int], listen: int) -> None:
    """Hand the agent its ends of what connects it with a runner."""
    if runner.number:
        socket.send_fds(control, [outcome_record.READY], [*theirs, runner.ended])
    elif listen:
        # for the agent to accept on: the only way out, and it ends in the agent
        with socket.create_server(("127.0.0.1", listen)) as listener:
            message.send(control, {"ready": True}, [*theirs, runner.ended, listener.fileno()])
    else:
        message.send(control, {"ready": True}, [*theirs, runner.ended])
    for fd in theirs:
        os.close(fd)


def _asked_soon(control: socket.socket) -> bool:
    """Whether the next request comes before there is time to prepare for it."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while poll.poll(_CALM_MS):
        request, fds = _heard(control)
        if request["op"] == "pack":
            _pack(control, fds)
        elif request["op"] == "next":
            return True
    return False


def _heard(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What the agent says. Never returns once it is gone."""
    received = message.receive(control)
    if received is None:
        os._exit(0)
    return received


def _pack(control: socket.socket, fds: list[int]) -> None:
    """Answer with the workspace, if it is small; no program runs now, so no process is needed for it."""
    said = outcome_record.TOO_LONG
    # a runner will meet the same error, and say so
    with contextlib.suppress(OSError):
        packed = files.pack_small("/work")
        if packed is not None:
            with open(fds[0], "wb", buffering=0, closefd=False) as out:
                while packed:
                    packed = packed[out.write(packed) :]
            said = outcome_record.PACKED
    for fd in fds:
        os.close(fd)
    control.sendall(said)


# ------------------------------------------------------------------------------------- layers


def _isolate(plan: dict[str, Any], programs: group.Programs) -> None:
    # first, so that a dead parent leaves no init behind
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with kernel.layer("user_namespace"):
        map_one_user(_UID_INSIDE, plan["uid"], plan["gid"])
        # the zygote's own user stayed in reserve
        os.setresgid(_UID_INSIDE, _UID_INSIDE, _UID_INSIDE)
        os.setresuid(_UID_INSIDE, _UID_INSIDE, _UID_INSIDE)
    with kernel.layer("mount_namespace"):
        work = f"size={plan['work_bytes']},nr_inodes={plan['work_inodes']},mode=755"
        kernel.mount("tmpfs", "/work", "tmpfs", _QUIET, f"{work},uid={_UID_INSIDE},gid={_UID_INSIDE}")
        for target, megabytes, inodes in zip(SCRATCH, (plan["tmp_mb"], 64), (20_000, 2_000), strict=True):
            options = f"size={megabytes}m,nr_inodes={inodes},mode=1777"
            kernel.mount("tmpfs", target, "tmpfs", _QUIET, options)
    if plan["base"]:
        with kernel.layer("overlay"):
            overlay.lay(plan["base"])
    with kernel.layer("proc"):
        kernel.mount("proc", "/proc", "proc", _QUIET | kernel.MS_NOEXEC)
        for name, most in _OWN_LIMITS.items():
            with contextlib.suppress(FileNotFoundError):  # a kernel built without it
                kernel.put(f"/proc/sys/user/{name}", str(most))
        kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND | kernel.MS_REC)
        kernel.set_mount_attributes("/proc/sys", kernel.ATTR_RDONLY)
    with kernel.layer("network_namespace"):
        _loopback_up()
    with kernel.layer("uts_namespace"):
        kernel.set_host_name("sandbox")
    with kernel.layer("mount_namespace"):
        _hide_mounts()
    with kernel.layer("capabilities"):
        kernel.keep_capabilities(*exec_program.KEPT)
    with kernel.layer("rlimits"):
        # should the machine run out of memory, a jail goes first
        kernel.put("/proc/self/oom_score_adj", "1000")
    with kernel.layer("no_new_privs"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    memory.open_counters(programs)
    if landlock.version():
        with kernel.layer("landlock"):
            landlock.confine(writable=("/work", *SCRATCH))
    program = seccomp.program(kernel.MACHINE, traceable=plan["traceable"])
    if program is not None:
        with kernel.layer("seccomp"):
            kernel.install_filter(program)


def _hide_mounts() -> None:
    """Show programs no list of mounts, which names folders of the host: theirs is that of another namespace.

    The root stays where it is, in a namespace that lives as long as init holds it open.
    """
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.unshare(kernel.NEWNS)
    os.fchdir(root)
    os.chroot(".")
    os.close(root)


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


class Runner(NamedTuple):
    """What init knows of a runner."""

    number: int
    pid: int
    ended: int
    """its pidfd"""
    report: int
    """pipe on which it says what it began, then how far it came"""
    requests: socket.socket
    """on which the agent asked it: afterwards, anything there says that the request is over"""
    timer: int
    """readable when it has been at work for a while"""


def _start_runner(
    limits: dict[str, int], timer: int, number: int, *, rehearse: bool
) -> tuple[Runner, list[int]]:
    """A runner, and the agent's ends of what connects it with that."""
    # every end of ours is closed in a runner, and every one of its own here
    (out, out_inside), (err, err_inside), (done, done_inside), (report, report_inside) = (
        os.pipe() for _ in range(4)
    )
    asking, asked = socket.socketpair()
    lines = runner.Lines(out_inside, err_inside, done_inside, asked.fileno(), report_inside, timer)
    pid = os.fork()
    if pid == 0:
        try:
            asked.detach()
            runner.main(lines, limits, rehearse=rehearse)
        finally:
            os._exit(70)
    for fd in (out_inside, err_inside, done_inside, report_inside):
        os.close(fd)
    os.set_blocking(report, False)
    return Runner(number, pid, os.pidfd_open(pid), report, asked, timer), [out, err, done, asking.detach()]


class _Began(NamedTuple):
    kind: int
    watch: memory.Watch
    cpu_s: float
    """that it took to get ready"""


class _End(NamedTuple):
    """Why a runner has ended, or is to end now."""

    began: _Began | None
    """what it began, if init woke while it ran"""
    oom: bool = False
    asked: bool = False
    """by the agent, that knows how it ended or does not wait"""
    packing: list[int] | None = None
    """where to put the workspace, instead of a word"""


def _ended(one: Runner, end: _End) -> outcome_record.Outcome:
    """End what is left, and tell how it ended."""
    status, cpu_s, peak = end_everything(one.pid)
    began = end.began or _began(one.report)
    if began is None:
        if end.asked:
            return outcome_record.Outcome(exit_code=None, signal=signal.SIGKILL)
        os._exit(0)  # the agent hung up
    oom = end.oom or (not end.asked and began.watch.killed_by_group(status))
    exit_code, signal_number = exit_status(status)
    refused = (
        runner.refusal(_read(one.report, outcome_record.SIZE)) if began.kind == runner.OPERATION else None
    )
    return outcome_record.Outcome(exit_code, signal_number, oom, max(0.0, cpu_s - began.cpu_s), peak, refused)


def _rehearse(timer: int) -> None:
    """The fork left every page shared: take steps of a request's end, to no effect, while none is here."""
    poll = select.poll()
    poll.register(timer, select.POLLIN)
    poll.poll(0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, {"op": "rehearsal", "run": -1}, [theirs.fileno()])
        for fd in _heard(ours)[1]:
            os.close(fd)
        theirs.sendall(outcome_record.encode(outcome_record.Outcome(exit_code=0)))
    # a program may have begun by now, and move what is being read
    with contextlib.suppress(OSError):
        files.pack_small("/work")


def _began(report: int) -> _Began | None:
    """What a runner has begun; None for nothing."""
    said = _read(report, runner.BEGAN.size)
    if len(said) < runner.BEGAN.size:
        return None
    kind, memory_bytes, cpu_s, *before = runner.BEGAN.unpack(said)
    folders = () if kind == runner.OPERATION else runner.WATCHED
    return _Began(kind, memory.Watch(memory_bytes, folders, memory.Before(*before)), cpu_s)


def _read(pipe: int, size: int) -> bytes:
    try:
        return os.read(pipe, size)
    except BlockingIOError:
        return b""


def _wait(one: Runner, control: socket.socket) -> _End:
    """Wait until a runner has ended, or everything is to end. Never returns once the agent is gone.

    Most Python source is done before init wakes for the first time: the agent hears that from the runner.
    """
    poll = select.poll()
    for source in (one.ended, control, one.timer):
        poll.register(source, select.POLLIN)
    began = None
    while True:
        events = {fd for fd, _ in poll.poll(None if began is None else runner.WATCH_S * 1000)}
        if one.ended in events:
            return _End(began)
        if control.fileno() in events:
            request, fds = _heard(control)
            ours = request.get("run") == one.number
            if request["op"] == "pack" and not ours:
                _pack(control, fds)
            elif ours:
                return _End(began, asked=True, packing=fds if request["op"] == "pack" else None)
        elif began is None:
            began = _began(one.report)
            poll.unregister(one.timer)
        elif _over(one.requests):
            return _End(began, asked=True)
        elif began.watch.exceeded():
            return _End(began, oom=True)


def _over(requests: socket.socket) -> bool:
    try:
        return requests.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return False


def _tidy(one: Runner) -> None:
    """Leave nothing of a request but the workspace."""
    kernel.set_timer(one.timer, 0)
    os.close(one.ended)
    os.close(one.report)
    one.requests.close()
    for folder in SCRATCH:
        if os.listdir(folder):
            files.clear(folder)
        os.chmod(folder, 0o1777)
