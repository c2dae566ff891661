"""Pid 1 of a jail: sets up its layers, then serves one request after another.

Between requests only the workspace stays: every process is killed, /tmp and /dev/shm are emptied. A runner,
forked in advance, waits for the next request, which the agent sends to it directly. Init watches the runner
and reports to the agent how the request ended; runners and programs never hold the socket of these reports.
If Python source finishes before init has woken even once, the runner itself has announced the result.
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
    cgroup,
    exec_program,
    files,
    kernel,
    memory,
    message,
    root,
    runner,
    seccomp,
)
from .exec_program import end_everything, exit_status

NAMESPACES = (
    kernel.NEWUSER | kernel.NEWPID | kernel.NEWNS | kernel.NEWNET
    | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
)  # fmt: skip
_UID_INSIDE = 1000
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
_MOST_TERMINALS = 32
_CALM_MS = 5
"""milliseconds without another request, after which the next runner is prepared"""
SCRATCH = ("/tmp", "/dev/shm")
WRITABLE = ("/work", files.STATE, *SCRATCH)
_OWN_LIMITS = {
    # a second barrier behind seccomp: no user namespaces below this one
    "max_user_namespaces": 0,
    # also counted for the user on the host, whose other programs need some
    "max_inotify_instances": 8,
    "max_inotify_watches": 4096,
}
"""settings of a user namespace in /proc/sys/user"""


def main(control: socket.socket, plan: dict[str, Any], programs: cgroup.JailCgroup) -> NoReturn:
    """Set up the jail and serve requests. `programs` is the control group for the jail's programs."""
    exec_program.close_all_but({control.fileno(), 2, *programs} - {-1})
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        """descriptors 0 to 2 are taken, so that no pipe of ours becomes a standard stream"""
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
        outcome = _collect_outcome(runner, end)
        if end.packing is None:
            control.sendall(message.encode_outcome(outcome))
        else:
            _pack(control, end.packing)
        _tidy(runner)
        # if the next request is already there, answer it at once with a runner that has not rehearsed
        rehearse = not _request_comes_soon(control)
        number += 1


def _announce(control: socket.socket, runner: RunnerProcess, theirs: list[int], listen: int) -> None:
    """Send the agent its ends of a runner's pipes."""
    if runner.number:
        socket.send_fds(control, [message.READY], [*theirs, runner.ended])
    elif listen:
        # the agent accepts on it: the only way out of the jail leads to the agent's proxy
        with socket.create_server(("127.0.0.1", listen)) as listener:
            message.send(control, {"ready": True}, [*theirs, runner.ended, listener.fileno()])
    else:
        message.send(control, {"ready": True}, [*theirs, runner.ended])
    for fd in theirs:
        os.close(fd)


def _request_comes_soon(control: socket.socket) -> bool:
    """Whether the next request comes before `_CALM_MS` have passed."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while poll.poll(_CALM_MS):
        request, fds = _receive(control)
        if request["op"] == "pack":
            _pack(control, fds)
        elif request["op"] == "next":
            return True
    return False


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The agent's next message. Exits if the agent is gone."""
    received = message.receive(control)
    if received is None:
        os._exit(0)
    return received


def _pack(control: socket.socket, fds: list[int]) -> None:
    """Answer with the workspace if it is small. No program runs now, so no process is needed."""
    said = message.TOO_LONG
    # a runner will meet and report the same error
    with contextlib.suppress(OSError):
        packed = files.pack_small("/work")
        if packed is not None:
            with open(fds[0], "wb", buffering=0, closefd=False) as out:
                while packed:
                    packed = packed[out.write(packed) :]
            said = message.PACKED
    for fd in fds:
        os.close(fd)
    control.sendall(said)


# ------------------------------------------------------------------------------------- layers


def _isolate(plan: dict[str, Any], programs: cgroup.JailCgroup) -> None:
    # first, so that init dies with its parent
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with kernel.layer("user_namespace"):
        map_one_user(_UID_INSIDE, plan["uid"], plan["gid"])
        # until here the zygote's user is in effect
        os.setresgid(_UID_INSIDE, _UID_INSIDE, _UID_INSIDE)
        os.setresuid(_UID_INSIDE, _UID_INSIDE, _UID_INSIDE)
    with kernel.layer("mount_namespace"):
        work = f"size={plan['work_bytes']},nr_inodes={plan['work_inodes']},mode=755"
        kernel.mount("tmpfs", "/work", "tmpfs", _QUIET, f"{work},uid={_UID_INSIDE},gid={_UID_INSIDE}")
        for target, megabytes, inodes in zip(SCRATCH, (plan["tmp_mb"], 64), (20_000, 2_000), strict=True):
            options = f"size={megabytes}m,nr_inodes={inodes},mode=1777"
            kernel.mount("tmpfs", target, "tmpfs", _QUIET, options)
        root.share_workspace()
        # an instance of its own, whose number of terminals the kernel bounds
        terminals = f"newinstance,ptmxmode=0666,mode=620,max={_MOST_TERMINALS}"
        kernel.mount("devpts", root.TERMINALS, "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, terminals)
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
        # if the machine runs out of memory, jails are killed first
        kernel.put("/proc/self/oom_score_adj", "1000")
    with kernel.layer("no_new_privs"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    memory.open_counters(programs)
    if kernel.landlock_version():
        with kernel.layer("landlock"):
            kernel.confine(writable=WRITABLE)
    program = seccomp.program(kernel.MACHINE)
    if program is not None:
        with kernel.layer("seccomp"):
            kernel.install_filter(program)


def _hide_mounts() -> None:
    """Move to a new mount namespace with the same root: programs' mount tables then list no host folders.

    The root stays mounted in the old namespace, which init keeps open.
    """
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.unshare(kernel.NEWNS)
    os.fchdir(root)
    os.chroot(".")
    os.close(root)


def map_one_user(inside: int, uid: int, gid: int) -> None:
    """Map `uid` and `gid` of the parent namespace to `inside` in ours."""
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


class RunnerProcess(NamedTuple):
    """A runner as init sees it."""

    number: int
    pid: int
    ended: int
    """pidfd"""
    report: int
    """pipe for the BEGAN record, then for a refusal"""
    requests: socket.socket
    """socket of the agent's request; afterwards, any byte on it says that the request is over"""
    timer: int
    """readable after the runner has worked for a while"""


def _start_runner(
    limits: dict[str, int], timer: int, number: int, *, rehearse: bool
) -> tuple[RunnerProcess, list[int]]:
    """Fork a runner. Returns it with the agent's ends of its pipes."""
    # the runner closes our ends, and we close the runner's
    (out, out_inside), (err, err_inside), (done, done_inside), (report, report_inside) = (
        os.pipe() for _ in range(4)
    )
    agent_end, runner_end = socket.socketpair()
    fds = runner.RunnerPipes(out_inside, err_inside, done_inside, runner_end.fileno(), report_inside, timer)
    pid = os.fork()
    if pid == 0:
        try:
            runner_end.detach()
            runner.main(fds, limits, rehearse=rehearse)
        finally:
            os._exit(70)
    for fd in (out_inside, err_inside, done_inside, report_inside):
        os.close(fd)
    os.set_blocking(report, False)
    return RunnerProcess(number, pid, os.pidfd_open(pid), report, runner_end, timer), [
        out,
        err,
        done,
        agent_end.detach(),
    ]


class _Began(NamedTuple):
    kind: int
    watch: memory.MemoryWatch
    cpu_s: float
    """CPU seconds before the program began"""


class _End(NamedTuple):
    """Why a runner has ended, or shall end now."""

    began: _Began | None
    """what the runner began, if init read it while it ran"""
    oom: bool = False
    by_agent: bool = False
    """the agent asked for the end: it knows the result, or does not wait for it"""
    packing: list[int] | None = None
    """descriptors to write the workspace to, instead of sending an outcome"""


def _collect_outcome(one: RunnerProcess, end: _End) -> message.RequestOutcome:
    """Kill what is left, and return the outcome."""
    status, cpu_s, peak = end_everything(one.pid)
    began = end.began or _began(one.report)
    if began is None:
        if end.by_agent:
            return message.RequestOutcome(exit_code=None, signal=signal.SIGKILL)
        os._exit(0)  # the agent hung up
    oom = end.oom or (not end.by_agent and began.watch.killed_by_group(status))
    exit_code, signal_number = exit_status(status)
    refused = (
        runner.refusal(_read(one.report, message.OUTCOME_SIZE)) if began.kind == runner.OPERATION else None
    )
    return message.RequestOutcome(exit_code, signal_number, oom, max(0.0, cpu_s - began.cpu_s), peak, refused)


def _rehearse(timer: int) -> None:
    """Run the steps of a request's end once, without effect: copies the pages that the fork shared."""
    poll = select.poll()
    poll.register(timer, select.POLLIN)
    poll.poll(0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, {"op": "rehearsal", "run": -1}, [theirs.fileno()])
        for fd in _receive(ours)[1]:
            os.close(fd)
        theirs.sendall(message.encode_outcome(message.RequestOutcome(exit_code=0)))
    # a program may already run and change files during the read
    with contextlib.suppress(OSError):
        files.pack_small("/work")


def _began(report: int) -> _Began | None:
    """The BEGAN record of a runner; None if there is none."""
    said = _read(report, runner.BEGAN.size)
    if len(said) < runner.BEGAN.size:
        return None
    kind, memory_bytes, cpu_s, *before = runner.BEGAN.unpack(said)
    folders = () if kind == runner.OPERATION else runner.WATCHED
    return _Began(kind, memory.MemoryWatch(memory_bytes, folders, memory.StartingMemory(*before)), cpu_s)


def _read(pipe: int, size: int) -> bytes:
    try:
        return os.read(pipe, size)
    except BlockingIOError:
        return b""


def _wait(one: RunnerProcess, control: socket.socket) -> _End:
    """Wait until a runner has ended or shall be ended. Exits if the agent is gone.

    Most Python source finishes before init wakes for the first time; its runner announces the result.
    """
    poll = select.poll()
    for source in (one.ended, control, one.timer):
        poll.register(source, select.POLLIN)
    began = None
    while True:
        events = {fd for fd, _ in poll.poll(None if began is None else began.watch.pause_s * 1000)}
        if one.ended in events:
            return _End(began)
        if control.fileno() in events:
            request, fds = _receive(control)
            ours = request.get("run") == one.number
            if request["op"] == "pack" and not ours:
                _pack(control, fds)
            elif ours:
                return _End(began, by_agent=True, packing=fds if request["op"] == "pack" else None)
        elif began is None:
            began = _began(one.report)
            poll.unregister(one.timer)
        elif _is_dismissed(one.requests):
            return _End(began, by_agent=True)
        elif began.watch.exceeded():
            return _End(began, oom=True)


def _is_dismissed(requests: socket.socket) -> bool:
    try:
        return requests.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return False


def _tidy(one: RunnerProcess) -> None:
    """Clean up after a request: only the workspace stays."""
    kernel.set_timer(one.timer, 0)
    os.close(one.ended)
    os.close(one.report)
    one.requests.close()
    for folder in SCRATCH:
        if os.listdir(folder):
            files.clear(folder)
        os.chmod(folder, 0o1777)
