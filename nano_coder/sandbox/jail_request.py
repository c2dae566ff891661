"""What goes into a jail and comes out: workspaces packed, arguments checked, output captured; and the agent's
side of a runner."""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import os
import select
import socket
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from nano_coder.sandbox.launcher import files, message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.protocol import ExecResult, ResourceUse
from nano_shared.errors import UsageError
from nano_shared.files import is_scratch
from nano_shared.printable import printable
from nano_shared.snapshot import SnapshotError
from nano_shared.types import Limits

WEEK_S = 604_800.0
"""longest time-out of a run, seconds"""
TERABYTE_MB = 1 << 20
"""most memory of a run, MB"""


def seal(data: bytes) -> int:
    """A sealed memory file with `data`, positioned at its start; the caller closes it."""
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


@contextlib.contextmanager
def opened(data: bytes | int) -> Iterator[int]:
    """A file descriptor to read `data` from; `data` itself if it is one."""
    if isinstance(data, int):
        yield data
        return
    fd = seal(data) if data else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def check_run(argv: Sequence[str], env: Mapping[str, str], timeout: float, output_bytes: int) -> None:
    """Raises UsageError for arguments that no program can be given."""
    if isinstance(argv, str) or not argv or not argv[0]:
        raise UsageError(f"argv must be a list with a program first, not {argv!r}")
    for text in (*argv, *env, *env.values()):
        if "\0" in text:
            raise UsageError(f"{text!r} holds a NUL byte, which no argument or variable can")
    for name in env:
        if not name or "=" in name:
            raise UsageError(f"{name!r} cannot name an environment variable")
    if not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if output_bytes < 1:
        raise UsageError(f"output_bytes must be positive, not {output_bytes!r}")


def python_program(python: str, source: str, argv: Sequence[str], *, isolated: bool) -> list[str]:
    """The command line that runs Python source."""
    return [python, *(["-I"] if isolated else []), "-c", source, *argv]


def check_limits(limits: Limits) -> Limits:
    """Raises UsageError for limits that bypassed their own validation."""
    for name in ("tool_seconds", "memory_mb", "output_bytes"):
        value = getattr(limits, name, None)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"limits.{name} must be a positive number, not {value!r}")
    return limits


def minimal_environment(search_path: str) -> dict[str, str]:
    """The environment of a program, before the caller's additions."""
    return {
        "PATH": search_path,
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "user",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        # the search for leaks traces the program's threads, which no jail allows: it would end every program
        "LSAN_OPTIONS": "detect_leaks=0",
    }


class RunnerClient:
    """The agent's connection to a runner, which waits in the jail for one request."""

    def __init__(self, fds: Sequence[int], number: int) -> None:
        """`fds`, which it then owns: stdout, stderr, announcement pipe, request socket, pidfd.

        `number` counts the runners of the jail.
        """
        self.out, self.err, self.done, requests, handle = fds
        self.number = number
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, requests)
        self._code: int | None = None
        self._before = 0.0
        self._usage: ProcessUsage | None = None
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)
        # impossible where /proc belongs to another pid namespace or hides processes: then init reports the
        # usage
        with contextlib.suppress(OSError):
            self._usage = ProcessUsage(pid_of(handle))
        os.close(handle)

    def send(self, request: dict[str, Any], given: Sequence[int]) -> None:
        """Send the request. Raises OSError if the runner is gone."""
        if self._usage is not None:
            self._before = self._usage.cpu_seconds() or 0.0
        message.send(self._requests, request, given)

    def read_announcement(self) -> bool:
        """Whether `done` holds an announcement: one byte, the exit code.

        The program may forge it, which claims no more than an exit code of its own choice would.
        """
        said = os.read(self.done, 2)
        self._code = said[0] if len(said) == 1 else None
        return self._code is not None

    @property
    def exit_code(self) -> int | None:
        """The announced exit code."""
        return self._code

    def outcome(self) -> RequestOutcome | None:
        """The outcome, with usage counted by the kernel; None if only init can report it."""
        used = self._usage.used() if self._usage is not None and self._code is not None else None
        if used is None:
            return None
        return RequestOutcome(
            exit_code=self._code, cpu_s=max(0.0, used[0] - self._before), peak_bytes=used[1]
        )

    def dismiss(self) -> None:
        """Tell init, without waking it, that the request is over: waking it now would cost a wait."""
        with contextlib.suppress(OSError):
            self._requests.send(b"\0")

    def close(self) -> None:
        for fd in (self.out, self.err, self.done):
            os.close(fd)
        self._requests.close()
        if self._usage is not None:
            self._usage.close()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads, without its children; seconds."""
    # clock id of another process's CPU clock, as clock_getcpuclockid computes it
    return time.clock_gettime(~pid << 3 | 2)


class ProcessUsage:
    """CPU time and memory of one process, read from /proc; opened while the pid is known to be right."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if /proc cannot be read."""
        self._pid = pid
        # stays bound to this process, even if its pid is reused
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def cpu_seconds(self) -> float | None:
        """Processor time so far, seconds; None once the process is gone."""
        try:
            return cpu_seconds(self._pid)
        except OSError:
            return None

    def used(self) -> tuple[float, int] | None:
        """Processor time in seconds and peak resident set in bytes; None if only its end will tell.

        None once it has waited for children: their usage is counted exactly at the end of the request.
        """
        try:
            fd = os.open(f"/proc/{self._pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.read(fd, 4096)
            finally:
                os.close(fd)
            seconds = cpu_seconds(self._pid)
            # read last: if this still works, the pid was still that process's
            fields = os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()
            children_faults = int(fields[8])
            peak = status.partition(b"VmHWM:")[2].split(None, 1)
        except (OSError, IndexError, ValueError):
            return None  # it ended meanwhile
        return None if children_faults or not peak else (seconds, int(peak[0]) * 1024)

    def close(self) -> None:
        os.close(self._stat)


def pid_of(handle: int) -> int:
    """The pid of a pidfd's process in the pid namespace of /proc. Raises OSError if it has none there."""
    with open(f"/proc/self/fdinfo/{handle}", "rb", buffering=0) as file:
        fields = (file.read(1024) or b"").partition(b"Pid:")[2].split(None, 1)
    pid = int(fields[0]) if fields else -1
    if pid <= 0:
        raise ProcessLookupError(f"descriptor {handle} has no process here")
    return pid


FLOOD_BYTES = 64 << 20
"""bytes of both streams together, beyond which the program is killed"""

_CHUNK = 1 << 16
_SHORT_MS = 3
"""milliseconds; the output of a program that ends sooner is read in one pass at its end"""


class Output:
    """First and last half of a byte stream, and its true size."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0

    def feed(self, chunk: bytes) -> None:
        self.size += len(chunk)
        room = self._head_limit - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        # cut only beyond twice the limit: cutting at each chunk would move the tail each time
        if len(self._tail) > 2 * self._tail_limit:
            self._cut()

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    def value(self) -> bytes:
        self._cut()
        return bytes(self._head + self._tail)


def captured(
    out: Output, err: Output, started: float, *, cpu_s: float = 0.0, peak_bytes: int = 0, **ending: Any
) -> ExecResult:
    """The result of a program that wrote these streams; `started` is on the monotonic clock."""
    return ExecResult(
        stdout=out.value(), stderr=err.value(), stdout_bytes=out.size, stderr_bytes=err.size,
        used=ResourceUse(wall_s=time.monotonic() - started, cpu_s=cpu_s, peak_bytes=peak_bytes), **ending,
    )  # fmt: skip


class Drain:
    """Reads pipes until `done` becomes readable; calls `kill` at the deadline or when there is too much
    output."""

    PATIENCE_S = 10.0
    """seconds that `done` may take after a kill"""

    def __init__(self, outputs: Mapping[int, Output], done: int, flood: int = FLOOD_BYTES) -> None:
        self._outputs = dict(outputs)
        self._done = done
        self._flood = flood
        self._early: tuple[int, Callable[[], bool]] | None = None
        self.timed_out = False
        self.flooded = False

    def stop_early_on(self, fd: int, announced: Callable[[], bool]) -> None:
        """Also stop when `fd` is readable and `announced()` is true."""
        self._early = fd, announced

    def run(self, timeout: float | None, kill: Callable[[], None]) -> bool:
        """True if `done` became readable; False if it did not, even after the kill."""
        poll = select.poll()
        poll.register(self._done, select.POLLIN)
        if self._early is not None:
            poll.register(self._early[0], select.POLLIN)
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._over(poll, poll.poll(_SHORT_MS if timeout is None else min(_SHORT_MS, timeout * 1000))):
            return True
        for fd in self._outputs:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        killed = False
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if killed:
                    return False
                self.timed_out = True
            if not killed and (self.timed_out or self.flooded):
                kill()
                killed, deadline, left = True, time.monotonic() + self.PATIENCE_S, self.PATIENCE_S
            events = poll.poll(None if left is None else left * 1000)
            if self._over(poll, events):
                return True
            for fd, _ in events:
                if fd in self._outputs and not self._read(fd):
                    poll.unregister(fd)

    def _over(self, poll: select.poll, events: list[tuple[int, int]]) -> bool:
        """Whether one of the events is the end; if so, takes all remaining output."""
        ready = {fd for fd, _ in events}
        if self._early is not None and self._early[0] in ready:
            if self._early[1]():
                self.take_written()
                return True
            poll.unregister(self._early[0])
            self._early = None
        if self._done in ready:
            self.finish()
            return True
        return False

    def finish(self) -> None:
        """Read what is left in the pipes; their writers are dead."""
        for fd in list(self._outputs):
            os.set_blocking(fd, False)
            while self._read(fd):
                pass

    def take_written(self) -> None:
        """Read what the pipes hold now, and no more: background processes of the program may write for
        ever."""
        waiting = array.array("i", [0])
        for fd, output in self._outputs.items():
            fcntl.ioctl(fd, termios.FIONREAD, waiting)
            until = output.size + waiting[0]
            while output.size < until and self._read(fd):
                pass

    def _read(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        self._outputs[fd].feed(chunk)
        self.flooded = sum(output.size for output in self._outputs.values()) > self._flood
        return bool(chunk)


class AnswerDrain(Drain):
    """Stops at what the pipes hold when the answer comes: processes that live on may write for ever."""

    def finish(self) -> None:
        self.take_written()


_LONGEST_NAME = 255
"""bytes of one path component, in every file system"""
_LONGEST_PATH = 2000
_NAMED = 5
"""unreadable paths that a sentence names"""


EXCLUDED = frozenset(
    {".git", ".hg", ".svn", ".venv", "__pycache__", "node_modules", ".tox", ".pytest_cache", ".mypy_cache",
     ".ruff_cache"}
)  # fmt: skip
"""names that are not copied into a jail: regenerable files, and repositories, which may hold secrets"""
WORK_MB = 512
"""MB that may be added to a workspace, besides twice its initial size"""
MOST_ENTRIES = 20_000
"""files, folders and links that may be added to a workspace"""


@dataclass(frozen=True, slots=True)
class PackedWorkspace:
    """A workspace as a tar stream, in memory or in a temporary file; the caller closes it."""

    stream: IO[bytes]
    size: int
    """of the stream, bytes"""
    entries: int
    """number of files, directories and symlinks"""

    @property
    def small(self) -> bool:
        """Whether it fits every jail, so that it can be sent with a request."""
        return self.size <= files.SMALL_BYTES


def snapshot_error(error: OSError, top: str = "/work") -> SnapshotError:
    """The error for a workspace below `top` of which no snapshot can be taken."""
    name = str(error.filename or "").removeprefix(top).strip("/")
    place = f" ({name[:100]!r})" if name else ""
    return SnapshotError(
        f"the workspace cannot be kept: {error.strerror or error}{place}; remove or mend that, or nothing of "
        "this run counts"
    )


def pack_workspace(folder: Path) -> PackedWorkspace:
    """Pack a folder. What its owner's permissions keep from being read is read in folders of ours, and left
    out of others, with a sentence. Raises UsageError if the folder is missing or cannot be read."""
    if not folder.exists():
        raise UsageError(f"no workspace at {str(folder)!r}: name an existing directory")
    if not folder.is_dir():
        raise UsageError(f"the workspace {str(folder)!r} is not a directory: name its directory")
    stream = tempfile.SpooledTemporaryFile(files.SMALL_BYTES, prefix="nano-workspace-")  # noqa: SIM115 (handed over)
    try:
        ours = is_scratch(folder)
        entries, unread = files.pack(os.fspath(folder), cast(IO[bytes], stream), EXCLUDED, ours=ours)
        say_unread(folder, unread)
    except OSError as error:
        stream.close()
        raise UsageError(
            f"cannot read {error.filename!r} of the workspace {str(folder)!r}: {error.strerror}"
        ) from error
    size = stream.tell()
    stream.seek(0)
    return PackedWorkspace(cast(IO[bytes], stream), size, entries)


def say_unread(folder: Path, paths: Sequence[str]) -> None:
    """Name on stderr the paths of a user's folder that are unreadable, and so not in the workspace."""
    if paths:
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        named = ", ".join(map(repr, paths[:_NAMED]))
        print(
            printable(f"{folder}: you may not read {named}{more}: left out, and left as it is"),
            file=sys.stderr,
        )
