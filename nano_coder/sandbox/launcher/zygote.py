"""The launcher's main program: builds one root, then forks one jail after another from it.

Two processes: the supervisor in the host's pid namespace waits for the zygote, which is pid 1 of its own.
Whichever way the agent, the supervisor or the zygote ends, the kernel kills everything below.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import site
import socket
import sys
from typing import Any, NoReturn

from . import become, init, interpret, kernel, landlock, message, root, runner, seccomp
from .group import Group

_INSIDE = (
    "import sys; sys.path.insert(0, {path!r}); from launcher.zygote import resume; resume({agent}, {events})"
)


def main() -> None:
    """Outside: isolate, build the root, and become the zygote."""
    control = socket.socket(fileno=0)
    received = message.receive(control)
    if received is None:
        return
    spec, _ = received
    agent = os.pidfd_open(spec["agent"])
    if os.getppid() != spec["agent"]:
        return
    group: Group | None = None
    try:
        if spec.get("group") is not None:
            with kernel.layer("cgroup"):
                group = Group(spec["group"])
        _unshare()
        pid = os.fork()
    except kernel.LayerError as error:
        if group is not None:
            group.remove()
        message.send(control, error.record())
        return
    if pid == 0:
        try:
            _enter(control, agent, spec, group)
        finally:
            os._exit(0)
    control.close()
    os.waitpid(pid, 0)
    if group is not None:
        group.remove()


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


def _enter(control: socket.socket, agent: int, spec: dict[str, Any], group: Group | None) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    owner = spec["unused_uid"] if os.geteuid() == 0 else os.geteuid()
    events = -1 if group is None else group.events
    try:
        if group is not None:
            with kernel.layer("cgroup"):
                group.enter()
        root.build(spec["root"])
        _drop_privileges(owner)
        if spec["warm_python"]:
            with kernel.layer("interpreter"):
                _restart(spec["warm_python"], spec["environment"], agent, events)
    except kernel.LayerError as error:
        message.send(control, error.record())
        return
    _serve(control, agent, events)


def _drop_privileges(owner: int) -> None:
    with kernel.layer("host_uid"):
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(owner, owner, owner)
            os.setresuid(owner, owner, owner)
            # a change of user clears both; without the second nobody may write our uid_map
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _restart(python: str, environment: dict[str, str], agent: int, events: int) -> NoReturn:
    """Begin anew as the jail's own interpreter: jails that run Python are forks of it."""
    os.set_inheritable(0, True)
    os.set_inheritable(agent, True)
    if events >= 0:
        os.set_inheritable(events, True)
    code = _INSIDE.format(path=root.LAUNCHER_INSIDE, agent=agent, events=events)
    # symbols are found once, and not in every jail
    os.execve(python, [python, "-s", "-S", "-P", "-c", code], {**environment, "LD_BIND_NOW": "1"})


def resume(agent: int, events: int) -> None:
    """Inside: what `_restart` begins."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.remove(root.LAUNCHER_INSIDE)
    site.main()
    # asked for by `_restart`, and no variable of a program's
    os.environ.pop("LD_BIND_NOW")
    interpret.prepare()
    runner.practise()
    _serve(socket.socket(fileno=0), agent, events)


def _serve(control: socket.socket, agent: int, events: int) -> None:
    """One jail a request, until the agent ends; when it only hangs up, until the last jail is gone.

    `events` is the open file in which the control group counts its kills, or below zero.
    """
    children: set[int] = set()
    become.reset_signals()
    # as Python has them: a write to what is closed is an error
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    # found out once, for every jail
    landlock.version()
    seccomp.program(kernel.MACHINE)
    kernel.last_capability()
    # what lives now is shared by every jail and never collected there
    gc.collect()
    gc.freeze()
    message.send(control, {"ready": True})
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(agent, select.POLLIN)
    hung_up = False
    while not (hung_up and not children):
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
            _make(control, agent, {**received[0], "events": events}, children)


def _reap(children: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            children.discard(pid)


def _make(control: socket.socket, agent: int, request: dict[str, Any], children: set[int]) -> None:
    """Fork a jail, and hand the agent its connection and a pidfd of its init."""
    request["uid"], request["gid"] = os.geteuid(), os.getegid()
    theirs, ours = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        with kernel.layer("user_namespace"):
            pid = kernel.clone(init.NAMESPACES)
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                for fd in (control.detach(), agent, theirs.detach()):
                    os.close(fd)
                init.main(ours, request)
            finally:
                # last words, for the agent to pass on
                sys.excepthook(*sys.exc_info())
                os._exit(70)
        children.add(pid)
        handle = os.pidfd_open(pid)
        message.send(control, {"made": True}, [theirs.fileno(), handle])
        os.close(handle)
    except kernel.LayerError as error:
        message.send(control, error.record())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        theirs.close()
        ours.close()
