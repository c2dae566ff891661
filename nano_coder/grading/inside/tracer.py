"""The tracer: runs in a jail and records which files a shell line opens, writes, executes and looks for.

The kernel announces every such system call of the line's processes (seccomp user notification), and the
tracer lets it continue. Writes one JSON object to stdout; the line's two streams go to the tracer's stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import re
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

_WORK = "/work"
try:
    with open("/opt/nano/links") as _file:
        _LINKS: list[tuple[str, str]] = [(target, link) for target, link in json.load(_file)]
except FileNotFoundError:
    _LINKS = []
_AT_CWD = -100
# name: number on x86_64 and aarch64; index of the arguments for path, folder descriptor and flags
_CALLS: dict[str, tuple[int | None, int | None, int, int | None, int | None]] = {
    "open": (2, None, 0, None, 1), "openat": (257, 56, 1, 0, 2), "openat2": (437, 437, 1, 0, None),
    "stat": (4, None, 0, None, None), "lstat": (6, None, 0, None, None), "newfstatat": (262, 79, 1, 0, None),
    "statx": (332, 291, 1, 0, None), "access": (21, None, 0, None, None), "faccessat": (269, 48, 1, 0, None),
    "faccessat2": (439, 439, 1, 0, None), "readlink": (89, None, 0, None, None),
    "readlinkat": (267, 78, 1, 0, None), "execve": (59, 221, 0, None, None),
    "execveat": (322, 281, 1, 0, None), "creat": (85, None, 0, None, None),
    "rename": (82, None, 1, None, None), "renameat": (264, 38, 3, 2, None),
    "renameat2": (316, 276, 3, 2, None),
    "symlink": (88, None, 1, None, None), "symlinkat": (266, 36, 2, 1, None),
    "link": (86, None, 1, None, None), "linkat": (265, 37, 3, 2, None),
}  # fmt: skip
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_ALLOW, _NOTIFY, _NO_CALL = 0x7FFF_0000, 0x7FC0_0000, 0x0005_0000 | 38
_RECEIVE, _ANSWER, _GO_ON = 0xC050_2100, 0xC018_2101, 1
_MAKING = ("creat", "rename", "symlink", "link")
_MOST_PATHS = 20_000
_SOURCES = re.compile(r"\.(py|pyi|js|mjs|cjs|ts|tsx|jsx|rb|pl|pm|php|lua|sh)$")
_MODULES = re.compile(r".*/(?:site-packages|dist-packages|lib-dynload|python3(?:\.\d+)?)/(.+)$")


def main() -> None:
    command, seconds = sys.argv[1], float(sys.argv[2])
    _libc().prctl(4, 0, 0, 0, 0)  # not dumpable: traced processes cannot look into this one
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            _become(command, theirs)
        finally:
            os._exit(126)
    theirs.close()
    _, received, _, _ = socket.recv_fds(ours, 1, 1)
    if not received:
        os.waitpid(child, 0)
        sys.exit("no notifications")
    watch = SyscallWatch()
    late = watch.follow(received[0], os.pidfd_open(child), time.monotonic() + seconds)
    if late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    ended = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None, "late": late}
    json.dump({**ended, **watch.found()}, sys.stdout)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _become(command: str, channel: socket.socket) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)
    os.closerange(3, channel.fileno())
    code = _filter(platform.machine())
    text = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(text))
    libc = _libc()
    libc.prctl(4, 1, 0, 0, 0)
    listener = libc.syscall(_SECCOMP[platform.machine()], 1, 8, header)
    if listener < 0:
        os._exit(126)
    socket.send_fds(channel, [b"x"], [listener])
    os.close(listener)
    channel.close()
    os.execve("/bin/sh", ["/bin/sh", "-c", command], dict(os.environ))


def _filter(machine: str) -> bytes:
    """BPF that notifies of the calls above, refuses a further filter, and allows the rest; the jail has a
    filter too."""
    watched = sorted(_watched(machine))

    def step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", operation, if_true, if_false, value)

    code = step(0x20, 0) + step(0x15, _SECCOMP[machine], len(watched) + 1, 0)
    for place, number in enumerate(watched):
        code += step(0x15, number, len(watched) - place + 1, 0)
    return code + step(6, _ALLOW) + step(6, _NO_CALL) + step(6, _NOTIFY)


def _watched(machine: str) -> dict[int, tuple[str, int, int | None, int | None]]:
    """Number -> name of the call, and the argument indices of path, folder and flags."""
    column = 0 if machine == "x86_64" else 1
    calls = ((numbers[column], (name, *numbers[2:])) for name, numbers in _CALLS.items())
    return {number: call for number, call in calls if number is not None}


class TracedProcess:
    """A process since its last exec."""

    def __init__(self, argv: list[str], environment: dict[str, str], folder: str) -> None:
        self.argv = argv
        self.folder = folder
        self.path = environment.get("PYTHONPATH", "")
        self.early = True
        """has not yet opened any source of the workspace"""
        self.number = -1


class SyscallWatch:
    def __init__(self) -> None:
        self.processes: dict[int, TracedProcess] = {}
        self.stale: set[int] = set()
        """pids that may have executed another program"""
        self.listed: list[TracedProcess] = []
        self.read: dict[str, dict[tuple[int, bool], None]] = {}
        self.missing: dict[str, dict[tuple[int, bool], None]] = {}
        self.written: dict[str, dict[tuple[int, bool], None]] = {}
        self.looked: set[str] = set()
        self.modules: set[str] = set()
        self.programs: set[str] = set()
        self._calls = _watched(platform.machine())

    def follow(self, listener: int, ended: int, deadline: float) -> bool:
        """Handle notifications until the line's shell has ended. True if the deadline passed."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            events = dict(poll.poll(left * 1000))
            if events.get(listener, 0) & select.POLLIN:
                self._serve(listener)
            elif ended in events:
                return False
            elif listener in events:
                poll.unregister(listener)
        return True

    def _serve(self, listener: int) -> None:
        notice = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError:
            return  # it was killed meanwhile
        key, pid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", notice)
        # it may have ended by now
        with contextlib.suppress(OSError, ValueError):
            self._note(pid, number, arguments)
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", key, 0, 0, _GO_ON))

    def _note(self, pid: int, number: int, arguments: list[int]) -> None:
        name, where, folder, flags = self._calls[number]
        path = _string(pid, arguments[where])
        executed = name.startswith("exec")
        if executed:
            self.stale.add(pid)
        if not path:
            return
        if not path.startswith("/"):
            start = ctypes.c_int(arguments[folder] & 0xFFFF_FFFF).value if folder is not None else _AT_CWD
            path = (
                os.readlink(f"/proc/{pid}/cwd" if start == _AT_CWD else f"/proc/{pid}/fd/{start}")
                + "/"
                + path
            )
        path = _outside(os.path.normpath(path))
        mode = arguments[flags] if flags is not None else 0
        opened = name.startswith("open") and mode & 3 != 1
        if path.startswith(_WORK + "/"):
            made = name.startswith(_MAKING)
            self._inside(pid, path, opened=opened or executed, written=made or mode & 3 != 0, made=made)
        elif executed:
            if os.path.exists(path):
                self.programs.add(os.path.basename(path))
        elif opened and (found := _MODULES.match(path)):
            self.modules.add(found[1].replace("__pycache__/", "").split("/")[0].split(".")[0])

    def _inside(self, pid: int, path: str, *, opened: bool, written: bool, made: bool) -> None:
        if len(self.read) + len(self.missing) + len(self.looked) + len(self.written) > _MOST_PATHS:
            return
        process = self._process(pid)
        for name in dict.fromkeys((path, os.path.realpath(path))):
            short = name[len(_WORK) + 1 :]
            if not name.startswith(_WORK + "/") or os.path.isdir(name):
                continue
            if written:
                self.written.setdefault(short, {})[process.number, process.early] = None
            if made:
                continue
            if not os.path.lexists(name):
                self.missing.setdefault(short, {})[process.number, process.early] = None
            elif opened:
                self.read.setdefault(short, {})[process.number, process.early] = None
            else:
                self.looked.add(short)
        if opened and _SOURCES.search(path) and os.path.isfile(path):
            process.early = False

    def _process(self, pid: int) -> TracedProcess:
        known = self.processes.get(pid)
        if known is not None and pid not in self.stale:
            return known
        self.stale.discard(pid)
        argv = _text(f"/proc/{pid}/cmdline").split("\0")[:-1]
        if known is not None and known.argv == argv:
            return known
        if known is None:
            parent = self.processes.get(_parent(pid))
            if parent is not None and parent.argv == argv:
                self.processes[pid] = parent
                return parent
        pairs = (pair.partition("=")[::2] for pair in _text(f"/proc/{pid}/environ").split("\0"))
        process = TracedProcess(argv, dict(pairs), os.readlink(f"/proc/{pid}/cwd"))
        process.number = len(self.listed)
        self.listed.append(process)
        self.processes[pid] = process
        return process

    def found(self) -> dict[str, Any]:
        return {
            "processes": [[[a[:500] for a in p.argv[:50]], p.folder, p.path] for p in self.listed],
            "read": {path: list(by) for path, by in self.read.items()},
            "written": {path: list(by) for path, by in self.written.items()},
            "missing": {path: list(by) for path, by in self.missing.items()},
            "looked": sorted(self.looked),
            "modules": sorted(self.modules),
            "programs": sorted(self.programs),
        }


def _outside(path: str) -> str:
    """Where a path below our link to the environment leads, which is no part of the workspace."""
    for target, link in _LINKS:
        if path.startswith(f"{link}/") and os.path.islink(link) and os.readlink(link) == target:
            return target + path[len(link) :]
    return path


def _string(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        # to the end of the page only: the next page may not be mapped
        data = memory.read(4096 - address % 4096)
        if b"\0" not in data:
            data += memory.read(4096)
    return os.fsdecode(data.partition(b"\0")[0])


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return os.fsdecode(file.read())


def _parent(pid: int) -> int:
    return int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
