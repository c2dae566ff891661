"""The sandbox contract: a backend opens jails on a workspace; a jail runs programs and moves files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, Unpack, runtime_checkable

from nano_shared.types import Denials, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one program did. Output beyond the cap is cut in the middle: head and tail are kept."""

    exit_code: int | None
    """None when a signal ended it"""
    signal: int | None
    timed_out: bool
    oom: bool
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    """size before the cap"""
    stderr_bytes: int
    wall_s: float
    cpu_s: float = 0.0
    """seconds of processor time of the program and what it started"""
    peak_bytes: int = 0
    """largest resident set of one of its processes"""
    denials: Denials = Denials()  # noqa: RUF009 (frozen, so one is enough)

    @property
    def truncated(self) -> bool:
        return self.stdout_bytes > len(self.stdout) or self.stderr_bytes > len(self.stderr)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def as_json(self) -> dict[str, object]:
        """What became of the run, with its output as text."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "timed_out": self.timed_out,
            "oom": self.oom,
            "stdout": self.stdout.decode("utf-8", "backslashreplace"),
            "stderr": self.stderr.decode("utf-8", "backslashreplace"),
            "truncated": self.truncated,
            "wall_s": round(self.wall_s, 6),
        }


class RunOptions(TypedDict, total=False):
    """What may be said of a run beside the program itself."""

    stdin: bytes | int
    """what it reads; a number is an open descriptor, which stays the caller's: a socket, to talk with it"""
    timeout: float
    """seconds of wall time; the jail's limit if left out"""
    env: Mapping[str, str]
    """added to the minimal environment"""
    output_bytes: int
    """kept of each stream; the jail's limit if left out"""


class Jail(Protocol):
    """One private workspace, mounted at /work. Files stay between runs, processes do not."""

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        """Run a program in /work.

        Raises UsageError for arguments that no program can be given, SandboxError when the jail itself fails;
        the program's failure is a result.
        """
        ...

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        """Run Python source as `python -c source *argv` does, in a warm interpreter where there is one.

        `isolated` keeps the workspace off the path, as `python -I` does. Raises as `run` does.
        """
        ...

    def read(self, path: str) -> bytes:
        """A regular file of the workspace, read inside the jail.

        Raises FileNotFoundError, IsADirectoryError, PermissionError as the program inside would see them.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace inside the jail, making parent directories."""
        ...

    def snapshot(self) -> bytes:
        """The workspace as an uncompressed tar stream, written inside the jail.

        Raises SnapshotError for a workspace that a program made too large, too deep or unreadable.
        """
        ...

    def restore(self, snapshot: bytes) -> None:
        """Replace the workspace by what a snapshot holds, inside the jail."""
        ...

    def close(self) -> None:
        """Kill what is left and remove the private workspace. Idempotent."""
        ...


class Sandbox(Protocol):
    """A backend. `layers` says which layer of isolation is on, for the execution log."""

    name: str
    layers: Mapping[str, bool]
    python: str
    """the interpreter's path inside the jail, for argv[0]"""

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        """A jail on a private copy of `workspace` (None: empty). The original is never written to.

        Raises SandboxError with the reason and the remedy where this machine cannot isolate.
        """
        ...


@runtime_checkable
class Showing(Protocol):
    """A sandbox whose jails can be shown another folder of the host, read-only."""

    def showing(self, source: Path, target: str) -> Sandbox:
        """The same sandbox with `source` at `target`; this one's jails do not see it."""
        ...


@runtime_checkable
class Traceable(Protocol):
    """A sandbox in whose jails a tracer of ours may watch the system calls of a program."""

    def open_traceable(self, workspace: Path, limits: Limits) -> Jail:
        """As `Sandbox.open`."""
        ...


class LazyJail:
    """The Jail that `opener` makes, made on first use. Raises what the opener raises, then."""

    def __init__(self, opener: Callable[[], Jail]) -> None:
        self._opener = opener
        self._jail: Jail | None = None

    @property
    def opened(self) -> bool:
        return self._jail is not None

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        return self._open().run(argv, **options)

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        return self._open().run_python(source, argv, isolated=isolated, **options)

    def read(self, path: str) -> bytes:
        return self._open().read(path)

    def write(self, path: str, data: bytes) -> None:
        self._open().write(path, data)

    def snapshot(self) -> bytes:
        return self._open().snapshot()

    def restore(self, snapshot: bytes) -> None:
        self._open().restore(snapshot)

    def close(self) -> None:
        if self._jail is not None:
            self._jail.close()

    def _open(self) -> Jail:
        if self._jail is None:
            self._jail = self._opener()
        return self._jail
