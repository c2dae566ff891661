"""A runner: serves one request of a jail, a program, Python source or a file operation by trusted code.

Forked by init before the request is known, so that its first page faults are over by then. The agent sends
the request to it directly, and it announces the end of Python source to the agent directly.

In a jail that keeps its processes one runner is the server (`serve`), with the rights of the programs, for as
long as the jail lives: it forks a child for each request. At the end of a request only its child is gone; a
request that the agent ends loses its session.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, NoReturn

from . import exec_program, files, kernel, memory, message, warm_python

BEGAN = struct.Struct("=BQdQQ")
"""what a runner begins: kind, memory limit in bytes, CPU seconds so far, and the fields of StartingMemory"""
OPERATION, PROGRAM, PYTHON = range(3)
_KINDS = {"run": PROGRAM, "python": PYTHON}
WATCHED = ("/work", "/tmp", "/dev/shm")
"""in-memory file systems that programs write to"""
_REHEARSED = "/dev/shm"
_ENOUGH = 10
"""repetitions after which Python has specialised the code that it runs"""


class RunnerPipes(NamedTuple):
    """A runner's descriptors of its pipes and sockets to the agent and to init."""

    out: int
    err: int
    done: int
    """pipe to the agent: one byte, the exit code, when Python source is done"""
    requests: int
    """socket for the agent's request; closed before a program begins"""
    report: int
    """pipe to init: the BEGAN record, then a refusal"""
    timer: int
    """wakes init when a program has run for a while"""


def main(pipes: RunnerPipes, limits: dict[str, int], *, rehearse: bool) -> NoReturn:
    """Serve one request. `limits` are the rlimits that every request has."""
    memory.programs().join()
    os.setsid()
    os.chdir("/work")
    kernel.drop_bounding_set()
    if rehearse:
        _rehearse()
    # before the request comes, so that everything is ready for it
    _take_streams(
        [pipes.out, pipes.err], {pipes.done, pipes.requests, pipes.report, pipes.timer, *memory.programs()}
    )
    warm_python.make_ready()
    exec_program.limit(limits)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, pipes.requests) as requests:
        received = message.receive(requests)
    if received is None:
        os._exit(0)  # the agent hung up
    _serve(*received, pipes)


def _serve(request: dict[str, Any], fds: list[int], pipes: RunnerPipes) -> NoReturn:
    kind = _KINDS.get(request["op"], OPERATION)
    try:
        # while only trusted code runs, init watches a file operation
        if kind == OPERATION:
            _begin(OPERATION, request, pipes)
        if request["unpack"]:
            _unpack(fds.pop(0))
    except OSError as error:
        if kind != OPERATION:
            _begin(OPERATION, request, pipes)
        _refuse(pipes.report, error, message.UNFIT)
    if fds:
        os.dup2(fds[0], 0)
        os.close(fds[0])
    if kind == OPERATION:
        try:
            _operate(request)
        except OSError as error:
            _refuse(pipes.report, error, message.REFUSED)
        os._exit(0)
    _begin(kind, request, pipes)
    for fd in (pipes.report, pipes.timer, *memory.programs()):
        if fd >= 0:
            os.close(fd)
    kernel.drop_capabilities()
    files.lay_links()
    if kind == PROGRAM:
        exec_program.reset_own_signals()
        exec_program.execute(request["argv"], request["env"])
    pipe = os.fstat(pipes.done)
    warm_python.run(request, lambda code: _say_done(pipes.done, pipe, code))


def serve_forked(request: dict[str, Any], fds: list[int], report: int) -> NoReturn:
    """Serve a request in a fork of the server of a jail that keeps its processes (`kept`).

    `fds` are its standard output and error, then what `_serve` gets; a refusal goes to the pipe `report`.
    """
    out, err, *given = fds
    _take_streams([out, err], {report, *given})
    warm_python.make_ready()
    try:
        if request["unpack"]:
            _unpack(given.pop(0))
        if given:
            os.dup2(given[0], 0)
            os.close(given[0])
        if (kind := _KINDS.get(request["op"], OPERATION)) == OPERATION:
            _operate(request)
            os._exit(0)
    except OSError as error:
        _refuse(report, error, message.UNFIT if request["op"] in _KINDS else message.REFUSED)
    os.close(report)
    files.lay_links()
    if kind == PROGRAM:
        exec_program.reset_own_signals()
        exec_program.execute(request["argv"], request["env"])
    warm_python.run(request, lambda code: False)


def _begin(kind: int, request: dict[str, Any], pipes: RunnerPipes) -> None:
    """Tell init what begins. Init reads it when the timer wakes it, or at the end, before which most programs
    end."""
    # the unpacked workspace does not count as the program's memory
    before = memory.before(() if kind == OPERATION else WATCHED)
    if kind != OPERATION:
        memory.programs().begin(before.stored + request["memory_bytes"])
    os.write(pipes.report, BEGAN.pack(kind, request["memory_bytes"], time.process_time(), *before))
    kernel.set_timer(pipes.timer, memory.WATCH_S)


def _refuse(report: int, error: OSError, status: int) -> NoReturn:
    os.write(report, struct.pack("=H", error.errno or errno.EIO) + (error.strerror or str(error)).encode())
    os._exit(status)


def refusal(said: bytes) -> tuple[int, str] | None:
    """The errno and text that `_refuse` wrote; None if it wrote nothing."""
    if len(said) < 2:
        return None
    return struct.unpack("=H", said[:2])[0], said[2:].decode(errors="backslashreplace")


def warm_up() -> None:
    """In the zygote, once: run those steps of a request that have no lasting effect.

    Python's caches and specialised code are then shared by all jails, instead of being written to copied
    pages in each.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for _ in range(_ENOUGH):
        timer = kernel.make_timer()
        kernel.set_timer(timer, 1)
        kernel.set_timer(timer, 0)
        os.close(timer)
        os.close(os.pidfd_open(os.getpid()))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            message.send(theirs, {"op": "practice", "env": {"PATH": "/bin"}}, [null])
            for fd in (message.receive(ours) or ({}, []))[1]:
                os.close(fd)
            theirs.sendall(message.encode_outcome(message.RequestOutcome(exit_code=0)))
        BEGAN.unpack(BEGAN.pack(PYTHON, 1, time.process_time(), *memory.before(WATCHED)))
        exec_program.limit({"RLIMIT_CORE": 0})  # the value it gets in any case
        for member in (reader := files.TarReader(io.BytesIO(_archive()))):
            files.TarMember(files.check_path(member.name), *member[1:])
            b"".join(reader.contents())
        warm_python.rehearse()
    os.close(null)


def _rehearse() -> None:
    """Run the steps of a request without effect, so that their page faults are over before a request
    comes."""
    null = os.open(os.devnull, os.O_RDWR)
    saved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1, 2)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, {"op": "rehearsal", "env": {"PATH": "/bin"}}, [null, null])
        received = message.receive(ours)
    _take_streams(received[1] if received else [], None)
    kernel.set_capabilities(*exec_program.KEPT)
    exec_program.limit({"RLIMIT_CORE": 0})  # the value it gets in any case
    _unpack_into(_REHEARSED, io.BytesIO(_archive()))
    files.clear(_REHEARSED)
    warm_python.rehearse()
    for number, fd in enumerate(saved):
        os.dup2(fd, number)
        os.close(fd)
    os.close(null)


def _archive() -> bytes:
    """A tar stream of two small files."""
    out = io.BytesIO()
    for name in ("a", "b"):
        files.write_member(out, files.TarMember(name, files.FILE, 0o644, 1))
        out.write(b"x")
        files.write_padding(out, 1)
    files.write_end(out)
    return out.getvalue()


def _unpack(packed: int) -> None:
    """Replace the workspace by the contents of a tar stream."""
    with open(packed, "rb") as source:
        _unpack_into("/work", source)
    os.chmod("/work", 0o755)


def _unpack_into(folder: str, source: IO[bytes]) -> None:
    root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    files.clear(folder)
    files.unpack(root, source)
    os.close(root)


def _operate(request: dict[str, Any]) -> None:
    """Run a file operation, from standard input or to standard output."""
    if request["op"] != "pack":
        kernel.drop_capabilities()
    if request["op"] in ("read", "write"):
        ours, path = files.placed(request["path"])
        root = os.open(files.STATE if ours else "/work", os.O_PATH | os.O_DIRECTORY)
        if request["op"] == "read":
            files.read(root, path, 1)
        else:
            files.write(root, path, 0)
            if ours:
                files.show_state("/work")
    elif request["op"] == "pack":
        files.survey("/work", request["size"])
        with open(1, "wb", closefd=False) as target:
            files.pack("/work", target)
    elif request["op"] == "probe":
        with open(1, "w", closefd=False) as target_text:
            json.dump(attempts(request["secret"]), target_text)


def _say_done(done: int, pipe: os.stat_result, code: int) -> bool:
    # if the program closed it, or put another file there, init notices the end instead
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(done), pipe):
            return os.write(done, bytes([code])) == 1
    return False


def _take_streams(fds: list[int], kept: set[int] | None) -> None:
    """Make these descriptors standard output and error; standard input is empty.

    Other descriptors are closed except `kept` (negative ones are ignored); None closes nothing.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    # above 2, so that no copy overwrites one that is still needed
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (null, *fds)]
    for fd in (null, *fds):
        os.close(fd)
    for number, fd in enumerate(copies):
        os.dup2(fd, number)
        os.close(fd)
    if kept is not None:
        exec_program.close_all_but({0, 1, 2, *(kept - {-1})})


def attempts(secret: str, uid: int = 1000) -> dict[str, bool]:
    """The self-test: try to escape. Returns layer -> whether it held. `secret` is a file that must not be
    readable, `uid` the program's own in its user namespace."""
    return {
        "network_namespace": not _connects(),
        "mount_namespace": not _reads(secret),
        "read_only_root": not any(_writes(folder) for folder in ("/", "/usr", "/etc", "/dev", "/proc/sys")),
        # only processes that were started before this one, from pid 1 on; in a container, threads of its
        # runtime had the pids between
        "pid_namespace": _processes() in (list(range(1, os.getpid() + 1)), [1, os.getpid()]),
        "user_namespace": os.getuid() == uid and not _reads("/proc/1/environ"),
        "capabilities": _status("CapEff") == _status("CapBnd") == "0" * 16,
        "no_new_privs": _status("NoNewPrivs") == "1",
    }


def _connects() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            # a datagram socket connects wherever there is a route; nothing is sent
            handle.connect(("192.0.2.1", 9))
        except OSError:
            return False
    return True


def _processes() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _reads(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(1) != b""
    except OSError:
        return False


def _writes(folder: str) -> bool:
    try:
        os.mkdir(os.path.join(folder, "nano-probe"))
    except OSError:
        return False
    return True


def _status(name: str) -> str:
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{name}:"))


_STANDSTILL_S = 0.2
_ROUNDS, _PAUSE_S = 500, 0.01
"""attempts to kill a session whose processes fork meanwhile; after them every process goes"""


def serve() -> NoReturn:
    """Serve the socket on standard input until the other side closes it."""
    # a high number, so that a program finds no descriptor of ours among the low ones
    channel = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 200))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    # so that what a request leaves behind is reaped here
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    while (received := message.receive(channel)) is not None:
        request, fds = received
        if request["op"] == "end":  # of a request that has ended meanwhile
            continue
        # a file that changes while it is packed makes no snapshot
        with _stopped() if request["op"] == "pack" else contextlib.nullcontext():
            outcome = _served(channel, request, fds)
        channel.sendall(message.encode_outcome(outcome))
    os._exit(0)


def _served(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> message.RequestOutcome:
    report, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            serve_forked(request, fds, theirs)
        finally:
            os._exit(70)
    for fd in (theirs, *fds):
        os.close(fd)
    ended = os.pidfd_open(pid)
    if not _wait(ended, channel):
        _kill_session(pid)
    _, status, usage = os.wait4(pid, 0)
    os.close(ended)
    _reap()
    os.set_blocking(report, False)
    with open(report, "rb", buffering=0) as said:
        refused = refusal(said.read(message.OUTCOME_SIZE) or b"")
    exit_code, number = exec_program.exit_status(status)
    used, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    return message.RequestOutcome(exit_code, number, False, used, peak, refused)


def _wait(ended: int, channel: socket.socket) -> bool:
    """Whether the request ended by itself; False if the agent ends it. Exits if the agent is gone."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(channel, select.POLLIN)
    if ended in {fd for fd, _ in poll.poll()}:
        return True
    if message.receive(channel) is None:
        os._exit(0)
    return False


def _kill_session(leader: int) -> None:
    for _ in range(_ROUNDS):
        if not (members := [pid for pid in _processes() if _session(pid) == leader]):
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    exec_program.kill_all()


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """All other processes stand still meanwhile."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        ours, until = (1, os.getpid()), time.monotonic() + _STANDSTILL_S
        while any(_state(pid)[0] in b"RSD" for pid in _processes() if pid not in ours):
            if time.monotonic() > until:
                break
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)


def _session(pid: int) -> int | None:
    """Its session; None for one that has ended."""
    state, session = _state(pid)
    return None if state in b"ZX" else session


def _state(pid: int) -> tuple[bytes, int]:
    """Its state, as the kernel's letter, and its session."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return b"X", 0
    return fields[0], int(fields[3])


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
