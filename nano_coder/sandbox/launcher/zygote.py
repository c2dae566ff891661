"""The zygote and its supervisor: build one root, then fork one jail after another from it.

The supervisor stays in the host's pid namespace and does what needs its privileges; the zygote is pid 1 of
its own namespace. If the agent, the supervisor or the zygote ends, the kernel kills everything below it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import signal
import site
import socket
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from . import exec_program, init, kernel, message, root, runner, seccomp, warm_python
from .cgroup import ControlGroup, JailCgroup

_INSIDE = "import sys; sys.path.insert(0, {path!r}); from launcher.zygote import resume; resume{call}"
UIDS = range(0x7800_0000, 0x7FFD_0000)
"""uids that no machine assigns: systemd, subordinate ids and directory services end below"""
_UIDS_A_LAUNCHER = 1024
_TRIES = 100


def main() -> None:
    """Supervisor, outside: isolate, build the root, and fork the zygote."""
    control = socket.socket(fileno=0)
    received = message.receive(control)
    if received is None:
        return
    spec, _ = received
    agent = os.pidfd_open(spec["agent"])
    if os.getppid() != spec["agent"]:
        return
    group = None
    with contextlib.suppress(OSError):
        group = ControlGroup(spec["group"]) if spec.get("group") else None
    with _claimed_uids() if spec["own_uids"] else contextlib.nullcontext(0) as first_uid:
        _supervise(control, agent, spec, group, first_uid)
    if group is not None:
        group.remove()


@contextlib.contextmanager
def _claimed_uids() -> Iterator[int]:
    """The first of a block of uids that no other launcher uses, until the block is left or this process dies.

    A socket's abstract name reserves it within our network namespace; elsewhere only the random choice does.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        for _ in range(_TRIES):
            blocks = len(UIDS) // _UIDS_A_LAUNCHER
            first = UIDS[int.from_bytes(os.urandom(4), "little") % blocks * _UIDS_A_LAUNCHER]
            with contextlib.suppress(OSError):
                claim.bind(f"\0nano-uids-{first}")
                break
        yield first


def _supervise(
    control: socket.socket, agent: int, spec: dict[str, Any], group: ControlGroup | None, first_uid: int
) -> None:
    ours, theirs = socket.socketpair()
    # kept open: from the fork on the zygote may exchange the root of both processes
    processes = os.open("/proc", os.O_PATH)
    try:
        _unshare()
        pid = os.fork()
    except kernel.LayerError as error:
        message.send(control, error.record())
        return
    if pid == 0:
        try:
            ours.close()
            os.close(processes)
            _enter(control, agent, spec, group, theirs)
        finally:
            os._exit(0)
    control.close()
    theirs.close()
    process = os.open(str(pid), os.O_PATH, dir_fd=processes)
    os.close(processes)
    # until the last process of the zygote has closed its end
    while (request := message.receive(ours)) is not None:
        try:
            fds = _grant(request[0], process, group, first_uid)
            message.send(ours, {}, fds)
            for fd in fds:
                os.close(fd)
        except OSError as error:
            message.send(ours, kernel.LayerError("supervisor", error.errno, str(error)).record())
    os.waitpid(pid, 0)


def _grant(request: dict[str, Any], process: int, group: ControlGroup | None, first_uid: int) -> list[int]:
    """Privileged requests of the zygote: the control group of a jail, or the uid map."""
    if "jail" in request and group is not None:
        return list(group.make_programs(request["jail"]))
    if "uids" in request:
        for name in ("gid_map", "uid_map"):
            fd = os.open(name, os.O_WRONLY, dir_fd=process)
            os.write(fd, f"0 {first_uid} {_UIDS_A_LAUNCHER}".encode())
            os.close(fd)
    return []


def _unshare() -> None:
    """Root keeps its privileges for the mounts; an ordinary user gets them in a user namespace."""
    if os.geteuid() == 0:
        with kernel.layer("mount_namespace"):
            kernel.unshare(kernel.NEWNS | kernel.NEWPID)
        return
    uid, gid = os.geteuid(), os.getegid()
    with kernel.layer("user_namespace"):
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID)
        init.map_one_user(uid, uid, gid)


def _enter(
    control: socket.socket,
    agent: int,
    spec: dict[str, Any],
    group: ControlGroup | None,
    supervisor: socket.socket,
) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    grouped = False
    try:
        with contextlib.suppress(OSError):
            if group is not None:
                group.enter()
                grouped = True
        root.build(spec["root"])
        with kernel.layer("host_uid"):
            _drop_privileges(spec, supervisor)
        jails = _Jails(supervisor.detach(), grouped, own_uids=spec["own_uids"])
        if spec["warm_python"]:
            with kernel.layer("interpreter"):
                _restart(spec["warm_python"], spec["environment"], agent, jails)
    except kernel.LayerError as error:
        message.send(control, error.record())
        return
    _serve(control, agent, jails)


def _drop_privileges(spec: dict[str, Any], supervisor: socket.socket) -> None:
    """Stop being root of the host, or stay the ordinary user. Raises OSError."""
    if os.geteuid() == 0:
        os.setgroups([])
        owner = spec["unused_uid"]
        if spec["own_uids"]:
            # root over a block of unassigned uids only, so that each jail can be a user of its own
            kernel.unshare(kernel.NEWUSER)
            message.send(supervisor, {"uids": True})
            granted = message.receive(supervisor)
            if granted is None or "layer" in granted[0]:
                raise PermissionError(errno.EPERM, f"no users for jails ({granted and granted[0]['detail']})")
            owner = 0
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
        if spec["own_uids"]:
            kernel.keep_capabilities(kernel.CAP_SETGID, kernel.CAP_SETUID)
        _stay_bound()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _stay_bound() -> None:
    """Restore the death signal and dumpability, which a change of user clears; uid_map needs the latter."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _restart(python: str, environment: dict[str, str], agent: int, jails: _Jails) -> NoReturn:
    """Exec the jail's own interpreter: jails that run Python are forks of it."""
    for fd in (0, agent, jails.supervisor):
        os.set_inheritable(fd, True)
    call = (agent, jails.supervisor, jails.grouped, jails.own_uids)
    code = _INSIDE.format(path=root.LAUNCHER_INSIDE, call=call)
    # resolve symbols once, and not in every jail
    os.execve(python, [python, "-s", "-S", "-P", "-c", code], {**environment, "LD_BIND_NOW": "1"})


def resume(agent: int, supervisor: int, grouped: bool, own_uids: bool) -> None:
    """Inside the new root: continue after `_restart`."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.remove(root.LAUNCHER_INSIDE)
    site.main()
    # set by `_restart`; programs must not see it
    os.environ.pop("LD_BIND_NOW")
    warm_python.prepare()
    runner.warm_up()
    _serve(socket.socket(fileno=0), agent, _Jails(supervisor, grouped, own_uids=own_uids))


class _Jails:
    """The living jails by number, which selects a jail's uid and control group."""

    def __init__(self, supervisor: int, grouped: bool, *, own_uids: bool) -> None:
        """`supervisor` is a socket to the supervisor."""
        self.supervisor = supervisor
        self.grouped = grouped
        self.own_uids = own_uids
        self.living: dict[int, int] = {}
        """pid -> number"""
        self._made = 0
        self._free: deque[int] = deque()
        self._groups: dict[int, JailCgroup] = {}

    def number(self) -> int:
        """A number that no jail has, the longest unused first: the kernel takes a moment to clean up after a
        jail."""
        if len(self._free) > 1:
            return self._free.popleft()
        self._made += 1
        return self._made

    def ended(self, pid: int) -> None:
        if (number := self.living.pop(pid, None)) is not None:
            self._free.append(number)

    def programs(self, number: int) -> JailCgroup:
        """The control group of a jail's programs; an empty JailCgroup without groups."""
        if self.grouped and number not in self._groups:
            with socket.socket(fileno=os.dup(self.supervisor)) as supervisor:
                message.send(supervisor, {"jail": number})
                granted = message.receive(supervisor)
            self._groups[number] = JailCgroup(*(granted[1] if granted else ()))
        return self._groups.get(number, JailCgroup())

    def uid(self, number: int) -> int:
        """Uid of the jail in this process's user namespace."""
        return min(number, _UIDS_A_LAUNCHER - 1) if self.own_uids else os.geteuid()


def _serve(control: socket.socket, agent: int, jails: _Jails) -> None:
    """Create one jail for each request, until the agent ends; if it only closes the socket, until no jail
    lives."""
    # each jail's group takes three open files here
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    exec_program.reset_signals()
    # as Python sets them: writing to a closed pipe is an error
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap(jails))
    # computed once, for every jail
    kernel.landlock_version()
    seccomp.program(kernel.MACHINE)
    kernel.last_capability()
    # freeze: objects that exist now are shared by all jails and never collected there
    gc.collect()
    gc.freeze()
    message.send(control, {"ready": True, "grouped": jails.grouped})
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(agent, select.POLLIN)
    hung_up = False
    while not (hung_up and not jails.living):
        ready = {fd for fd, _ in poll.poll(100 if hung_up else None)}
        if agent in ready:
            return
        if not ready:
            continue
        received = message.receive(control)
        if received is None:
            hung_up = True
            poll.unregister(control)
        else:
            _make(control, agent, received[0], jails)


def _reap(jails: _Jails) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            jails.ended(pid)


def _clone(uid: int) -> int:
    """Clone as another user: the creator of a user namespace may map its own uid only."""
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    _stay_bound()
    try:
        pid = kernel.clone(init.NAMESPACES)
    except OSError:
        pid = -1
        raise
    finally:
        if pid != 0:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            _stay_bound()
    return pid


def _make(control: socket.socket, agent: int, request: dict[str, Any], jails: _Jails) -> None:
    """Fork a jail, and send the agent its connection and a pidfd of its init."""
    theirs, ours = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        number = jails.number()
        programs, uid = jails.programs(number), jails.uid(number)
        gid = uid if jails.own_uids else os.getegid()
        with kernel.layer("user_namespace"):
            pid = _clone(uid) if jails.own_uids else kernel.clone(init.NAMESPACES)
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                for fd in (control.detach(), agent, theirs.detach()):
                    os.close(fd)
                init.main(ours, {**request, "uid": uid, "gid": gid}, programs)
            finally:
                # the traceback goes to stderr, which the agent quotes in errors
                sys.excepthook(*sys.exc_info())
                os._exit(70)
        jails.living[pid] = number
        handle = os.pidfd_open(pid)
        message.send(control, {"made": True}, [theirs.fileno(), handle])
        os.close(handle)
    except kernel.LayerError as error:
        message.send(control, error.record())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        theirs.close()
        ours.close()
