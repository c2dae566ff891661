"""One program in a container: podman started around it, our pid 1 inside, output and report on pipes of ours.

podman's own streams carry its complaints only. Pid 1 runs on nano's Python, which is mounted beside the
image's files, so that images without Python, or with another C library, run too.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_coder.sandbox.jail_request import FLOOD_BYTES, Drain, python_program, seal
from nano_coder.sandbox.launcher import root
from nano_containers.folder_jail import ProgramResult, ProgramSpec
from nano_shared.errors import SandboxError
from nano_shared.process import own_python


class HeldProgram(abc.ABC):
    """A program in namespaces of its own, whose pid 1 is ours and held by a pidfd."""

    _program: ProgramSpec
    _out: int
    _err: int
    _init: int

    @abc.abstractmethod
    def _failed(self) -> SandboxError:
        """The error for a program that was not started."""

    @abc.abstractmethod
    def _ask_to_stop(self) -> None:
        """Ask pid 1 to end the program."""

    @abc.abstractmethod
    def _report(self) -> Iterable[bytes]:
        """The records, JSON each, of the pid 1, once it is dead."""

    def collect(self) -> ProgramResult:
        """Collect output until every process is dead, at the latest some seconds after the time limit."""
        drain = Drain({self._out: self._program.out, self._err: self._program.err}, self._init, FLOOD_BYTES)
        if not drain.run(self._program.timeout, self._ask_to_stop):
            # works also where the program has stopped our process in the jail
            self._end_and_wait()
            drain.finish()
        records = [json.loads(line) for line in self._report()]
        if not records:
            raise self._failed()
        # no final record: our process in the jail was killed, by us, by the program or for memory
        ending = {"exit_code": None, "signal": signal.SIGKILL.value, **records[-1]}
        ending.pop("began", None)
        return ProgramResult(**ending, timed_out=drain.timed_out and ending["exit_code"] is None)

    def end(self) -> None:
        """Kill pid 1 and with it everything in the jail. Callable from any thread while it is held."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def _end_and_wait(self) -> None:
        self.end()
        poll = select.poll()
        poll.register(self._init, select.POLLIN)
        poll.poll(Drain.PATIENCE_S * 1000)


PATIENCE_S = 60.0
"""for podman to answer, to start a container, and to remove it"""
SEARCHED = "/usr/bin:/usr/local/bin:/bin:/usr/sbin:/sbin"
"""not the caller's PATH, which may lead into an untrusted repository"""
_CREDENTIALS = struct.Struct("3i")


def podman_environment() -> dict[str, str]:
    """The environment of podman itself: where the caller's images are, and nothing else of the caller's."""
    kept = ("HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "CONTAINERS_CONF",
            "CONTAINERS_STORAGE_CONF", "TMPDIR")  # fmt: skip
    return {"PATH": SEARCHED} | {name: os.environ[name] for name in kept if name in os.environ}


# ------------------------------------------------------------------------------------ nano's own Python

_OWN = f"{root.LAUNCHER_INSIDE}/python"
_MAPS = "import ctypes, json, resource, select, signal, socket, struct; print(open('/proc/self/maps').read())"


@dataclass(frozen=True, slots=True)
class CarriedPython:
    """The running interpreter, as it is mounted into images that may have none, or another C library."""

    binds: tuple[tuple[str, str], ...]
    """(source on the host, target inside), read-only"""
    argv: tuple[str, ...]
    """begins its command line inside"""
    environment: Mapping[str, str]


@functools.cache
def carried_python() -> CarriedPython:
    """Started through the host's own dynamic loader, with the host's folders of libraries."""
    argv = own_python("-I", "-S", "-c", _MAPS)
    maps = subprocess.run(argv, env={}, capture_output=True, text=True, check=True).stdout
    fields = (line.split(None, 5) for line in maps.splitlines())
    mapped = {os.path.realpath(each[5]) for each in fields if len(each) == 6 and ".so" in each[5]}
    loaders = [path for path in mapped if os.path.basename(path).startswith(("ld-", "ld."))]
    if not loaders:
        raise SandboxError(
            f"{sys.executable} has no dynamic loader: the sandbox 'podman' cannot carry it along"
        )
    standard = {sysconfig.get_path(name, vars=_BASE) for name in ("stdlib", "platstdlib")}
    folders = sorted(
        {os.path.dirname(path) for path in mapped if not any(path.startswith(f"{lib}/") for lib in standard)}
    )
    inside = [f"{root.LAUNCHER_INSIDE}/lib{number}" for number in range(len(folders))]
    binds = [(os.path.realpath(sys.executable), f"{_OWN}/bin/python3"), (loaders[0], f"{_OWN}/bin/loader")]
    binds += [(lib, f"{_OWN}/{os.path.relpath(lib, sys.base_prefix)}") for lib in sorted(standard)]
    binds += zip(folders, inside, strict=True)
    binds.append((os.path.dirname(root.__file__), f"{root.LAUNCHER_INSIDE}/launcher"))
    start = (f"{_OWN}/bin/loader", "--library-path", ":".join(inside), f"{_OWN}/bin/python3")
    return CarriedPython(tuple(binds), start, {"PYTHONHOME": _OWN})


_BASE = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix,
         "installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PythonStart:
    """How Python source is started in an image."""

    path: str | None
    """the image's python3; None if it has none"""
    modern: bool = False
    """whether it is new enough for source of ours"""

    def program(
        self, source: str, argv: Sequence[str], *, isolated: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """The command line and its variables."""
        if self.path is not None and (self.modern or not isolated):
            return python_program(self.path, source, argv, isolated=isolated), {}
        carried = carried_python()
        # -I would ignore PYTHONHOME
        flags = ["-P", "-s"] if isolated else []
        return [*carried.argv, *flags, "-c", source, *argv], {**carried.environment, "PYTHONPATH": ""}


# ------------------------------------------------------------------------------------------ a container


class ContainerRun(HeldProgram):
    """A program started in a container. Leaving `stack` kills it and waits until the container is gone."""

    GIVEN = 5
    """descriptors that pid 1 gets: request, channel, standard input, output and error"""
    PID_1 = ("-S", "-X", "utf8", "-c", f"import sys; sys.path.insert(0, {root.LAUNCHER_INSIDE!r}); "
             "from launcher import single_program; single_program.as_init()")  # fmt: skip

    def __init__(
        self,
        stack: contextlib.ExitStack,
        command: list[str],
        program: ProgramSpec,
        request: Mapping[str, Any],
    ) -> None:
        """Raises SandboxError with podman's message if it does not start the container."""
        self._program, self._stack = program, stack
        self._said = os.memfd_create("podman", os.MFD_CLOEXEC)
        stack.callback(os.close, self._said)
        self._channel, theirs = socket.socketpair()
        stack.callback(self._channel.close)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._channel.settimeout(PATIENCE_S)
        with contextlib.ExitStack() as handed:
            handed.callback(theirs.close)
            sealed = seal(json.dumps({"argv": program.argv, "env": program.env, **request}).encode())
            handed.callback(os.close, sealed)
            (self._out, out), (self._err, err) = self._pipe(handed), self._pipe(handed)
            given = (sealed, theirs.fileno(), program.stdin, out, err)
            self._podman = _spawn(command, given, self._said)
        stack.callback(self._reap)
        self._init = self._hold()
        stack.callback(os.close, self._init)
        stack.callback(self._end_and_wait)
        # pid 1 waits until here, so that its pid cannot have been reused before we hold its pidfd
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(b"1")

    def _pipe(self, handed: contextlib.ExitStack) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._stack.callback(os.close, reading)
        handed.callback(os.close, writing)
        return reading, writing

    def _hold(self) -> int:
        """A pidfd of the container's pid 1, whose pid the kernel tells with its first message."""
        try:
            said, ancillary, _, _ = self._channel.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            if not said:
                raise self._failed()
            return os.pidfd_open(_CREDENTIALS.unpack(ancillary[0][2])[0])
        except (TimeoutError, ConnectionError, ProcessLookupError) as error:
            raise self._failed() from error

    def _failed(self) -> SandboxError:
        os.kill(self._podman, signal.SIGTERM)
        self._reap()
        words = os.pread(self._said, 1 << 16, 0).decode(errors="backslashreplace").strip()
        return SandboxError(f"podman does not start the container ({words[-300:] or 'it said nothing'})")

    def _report(self) -> Iterable[bytes]:
        self._channel.setblocking(False)
        said = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while chunk := self._channel.recv(4096):
                said += chunk
        return said.splitlines()

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(b"1")

    def _reap(self) -> None:
        """Wait until podman has removed the container."""
        with contextlib.suppress(ChildProcessError):
            handle = os.pidfd_open(self._podman)
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                if not poll.poll(PATIENCE_S * 1000):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.waitpid(self._podman, 0)
            finally:
                os.close(handle)


def _spawn(argv: list[str], given: Sequence[int], said: int) -> int:
    """Start podman in a session of its own, with these descriptors from 3 on. Returns its pid."""
    with contextlib.ExitStack() as copies:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        copies.callback(os.close, null)
        actions = []
        for target, fd in enumerate((null, null, said, *given)):
            # beyond every target, so that none is overwritten before it is copied
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16)
            copies.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, target))
        try:
            return os.posix_spawn(
                argv[0], argv, podman_environment(), file_actions=actions, setsid=True, setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGINT),
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"cannot start {argv[0]}: {error.strerror}") from error
