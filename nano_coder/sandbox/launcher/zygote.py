"""The launcher's main program: builds one root, then runs one jail after another on its workspace.

Two processes: the supervisor in the host's pid namespace waits for the zygote, which is pid 1 of its own.
Whichever way the agent, the supervisor or the zygote ends, the kernel kills everything below.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from typing import Any

from . import jail, kernel, memory, message, root

_WATCH_MS = 50


def main() -> None:
    control = socket.socket(fileno=0)
    received = message.receive(control)
    if received is None:
        return
    spec, _ = received
    agent = os.pidfd_open(spec["agent"])
    if os.getppid() != spec["agent"]:
        return
    try:
        _unshare()
        pid = os.fork()
    except kernel.LayerError as error:
        message.send(control, error.record())
        return
    if pid == 0:
        try:
            _zygote(control, agent, spec)
        finally:
            os._exit(0)
    control.close()
    os.waitpid(pid, 0)


def _unshare() -> None:
    """Root keeps its privileges for the mounts; an ordinary user gets them in a user namespace."""
    if os.geteuid() == 0:
        with kernel.layer("mount_namespace"):
            kernel.unshare(kernel.NEWNS | kernel.NEWPID)
        return
    uid, gid = os.geteuid(), os.getegid()
    with kernel.layer("user_namespace"):
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID)
        jail.map_one_user(uid, uid, gid)


def _zygote(control: socket.socket, agent: int, spec: dict[str, Any]) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    owner = spec["unused_uid"] if os.geteuid() == 0 else os.geteuid()
    try:
        root.build(spec["root"], owner)
        _drop_privileges(owner)
    except kernel.LayerError as error:
        message.send(control, error.record())
        return
    message.send(control, {"ready": True})
    _serve(control, agent)


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


def _serve(control: socket.socket, agent: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(agent, select.POLLIN)
    while True:
        if any(fd == agent for fd, _ in poll.poll()):
            return
        received = message.receive(control)
        if received is None:
            return
        request, fds = received
        if request["op"] != "kill":  # one that came too late
            message.send(control, _execute(request, fds, control, agent))


def _execute(request: dict[str, Any], fds: list[int], control: socket.socket, agent: int) -> dict[str, Any]:
    request["uid"], request["gid"] = os.geteuid(), os.getegid()
    try:
        pid, report = jail.spawn(request, fds)
    except kernel.LayerError as error:
        return error.record()
    finally:
        for fd in fds:
            os.close(fd)
    oom = _watch(pid, control, agent, request["memory_bytes"])
    # returns when every process of the jail is gone
    os.waitpid(pid, 0)
    with open(report, "rb") as file:
        records = [json.loads(line) for line in file]
    result: dict[str, Any] = {
        "exit_code": None,
        "signal": int(signal.SIGKILL),
        "oom": oom,
        "reported": bool(records),
    }
    for record in records:
        result.update(jail.exit_record(record["status"]) if "status" in record else record)
    return result


def _watch(pid: int, control: socket.socket, agent: int, memory_bytes: int) -> bool:
    """Wait for init to end, and kill it when asked to, when the agent died or when memory ran out.

    True when it was memory.
    """
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (ended, control.fileno(), agent):
        poll.register(fd, select.POLLIN)
    oom = False
    while True:
        events = {fd for fd, _ in poll.poll(_WATCH_MS)}
        if ended in events:
            os.close(ended)
            return oom
        if events:
            os.kill(pid, signal.SIGKILL)
            for fd in events:
                poll.unregister(fd)
        elif memory.in_use() > memory_bytes and memory.proportional() > memory_bytes:
            oom = True
            os.kill(pid, signal.SIGKILL)
