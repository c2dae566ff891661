"""Jails with the workspace in a private directory of the host; and `none`, which isolates nothing.

A program may have replaced anything in the directory, so the host opens nothing in it by path: file
operations are confined beneath the directory, run one at a time with the programs, and act as the user who
owns it.

`none` runs a subprocess in such a directory. It keeps the contract of the other backends (private copy, time
limit, output cap), but a program can read and write whatever the user can. Refused unless
NANO_ALLOW_NO_SANDBOX=1.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Self, Unpack

from nano_coder.sandbox.jail_request import (
    FLOOD_BYTES,
    MOST_ENTRIES,
    WORK_MB,
    Drain,
    Output,
    captured,
    check_limits,
    check_run,
    minimal_environment,
    opened,
    pack_workspace,
    python_program,
    snapshot_error,
)
from nano_coder.sandbox.launcher import files, kernel
from nano_coder.sandbox.protocol import ExecResult, RunOptions
from nano_shared.errors import SandboxError, UsageError
from nano_shared.files import ScratchFolder
from nano_shared.types import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """A program to run, with its streams."""

    argv: list[str]
    env: dict[str, str]
    stdin: int
    """file descriptor"""
    out: Output
    err: Output
    timeout: float
    """seconds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended, with the fields of ExecResult."""

    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False
    cpu_s: float = 0.0
    peak_bytes: int = 0


class FolderJail(abc.ABC):
    """A jail over a directory. Requests are served one at a time; `close` may be called from any thread."""

    def __init__(
        self, limits: Limits, python: str, environment: Mapping[str, str], owner: int | None = None
    ) -> None:
        """`environment` is what programs get before a caller's additions, `owner` the uid and gid that they
        run as on the host, if it is not ours. Raises SandboxError if that user cannot reach the directory for
        temporary files."""
        self._limits = limits
        self._python = python
        self._environment = environment
        self._owner = owner
        self._request = threading.Lock()
        self._state = threading.Lock()
        self._kill: Callable[[], None] | None = None
        self._closed = False
        self._most = _most(limits)
        scratch = ScratchFolder("jail")
        self._folder = scratch.path
        # removed at the latest when this process ends, but not when a fork of it does
        self._remove = weakref.finalize(self, scratch.remove)
        self._work = os.path.join(self._folder, "work")
        self._ours = os.path.join(self._folder, "state")
        for folder in (self._work, self._ours):
            os.mkdir(folder, 0o755)
        if owner is not None:
            self._hand_over(owner)

    def _hand_over(self, owner: int) -> None:
        try:
            for folder in (self._work, self._ours, self._folder):
                os.chown(folder, owner, owner)
            with self._root():
                return
        except OSError as error:
            self.close()
            raise SandboxError(
                f"programs run as uid {owner}, which cannot own a directory in {tempfile.gettempdir()!r} "
                f"({error.strerror}); set TMPDIR to one that everybody can enter, such as /tmp"
            ) from error

    @property
    def _state_inside(self) -> str:
        """Where programs see our state."""
        return files.STATE

    @abc.abstractmethod
    def _execute(self, program: ProgramSpec) -> ProgramResult:
        """Run the program to its end, then kill everything it started."""

    def filled(self, workspace: Path | None) -> Self:
        """This jail with a copy of the workspace; closed, with UsageError, if that cannot be read."""
        if workspace is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(self.close)
                packed = pack_workspace(Path(workspace))
                self._most = _most(self._limits, packed.size, packed.entries)
                with packed.stream as stream:
                    self._fill(stream)
                stack.pop_all()
        return self

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        return self.run(python_program(self._python, source, argv, isolated=isolated), **options)

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        wall = options.get("timeout", self._limits.tool_seconds)
        cap = options.get("output_bytes", self._limits.output_bytes)
        env = options.get("env", {})
        check_run(argv, env, wall, cap)
        out, err = Output(cap), Output(cap)
        started = time.monotonic()
        with self._one_request(), opened(options.get("stdin", b"")) as stdin:
            ending = self._execute(
                ProgramSpec(
                    argv=list(argv),
                    env={**self._environment, **env},
                    stdin=stdin,
                    out=out,
                    err=err,
                    timeout=wall,
                )
            )
        return captured(out, err, started, **asdict(ending))

    @contextlib.contextmanager
    def _one_request(self) -> Iterator[None]:
        with self._request:
            self._check_open()
            yield
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the jail is closed: open another")

    @contextlib.contextmanager
    def _ended_by(self, kill: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `close` calls `kill`."""
        with self._state:
            self._kill = kill
            if self._closed:
                kill()
        try:
            yield
        finally:
            with self._state:
                self._kill = None

    def read(self, path: str) -> bytes:
        ours, name = files.placed(path)
        with self._one_request(), tempfile.TemporaryFile() as out, self._root(ours=ours) as root:
            files.read(root, name, out.fileno())
            out.seek(0)
            return out.read()

    def write(self, path: str, data: bytes) -> None:
        ours, name = files.placed(path)
        with self._one_request(), opened(data) as source, self._root(ours=ours) as root:
            files.write(root, name, source)
            if ours:
                files.show_state(self._work, self._state_inside)

    def snapshot(self) -> bytes:
        out = BytesIO()
        with self._one_request(), self._root():
            try:
                files.survey(self._work, *self._most)
                files.pack(self._work, out)
            except OSError as error:
                raise snapshot_error(error, self._work) from error
        return out.getvalue()

    def restore(self, snapshot: bytes) -> None:
        """Replace the workspace by the contents of a snapshot."""
        self._fill(BytesIO(snapshot))

    def _fill(self, stream: IO[bytes]) -> None:
        with self._one_request(), self._root() as root:
            try:
                files.clear(self._work)
                files.unpack(root, stream)
                os.chmod(self._work, 0o755)
            except OSError as error:
                raise UsageError(f"the workspace does not fit its jail: {error}") from error

    @contextlib.contextmanager
    def _root(self, *, ours: bool = False) -> Iterator[int]:
        """A descriptor of the workspace, or of our state, to open files beneath; inside the block, files are
        accessed as its owner."""
        with contextlib.ExitStack() as stack:
            if self._owner is not None:
                stack.enter_context(kernel.as_file_user(self._owner, self._owner))
            root = os.open(self._ours if ours else self._work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, root)
            yield root

    def close(self) -> None:
        with self._state:
            self._closed = True
            if self._kill is not None:
                self._kill()
        with self._request:
            self._remove()


def _most(limits: Limits, size: int = 0, entries: int = 0) -> tuple[int, int]:
    """Largest size (bytes) and number of entries that a workspace of this initial size may reach."""
    return ((limits.workspace_mb or WORK_MB) << 20) + 2 * size, MOST_ENTRIES + entries


PERMISSION = "NANO_ALLOW_NO_SANDBOX"


class NoSandbox:
    name = "none"

    def __init__(self, python: str | None = None) -> None:
        """Raises SandboxError unless the environment variable allows it."""
        if os.environ.get(PERMISSION) != "1":
            raise SandboxError(
                f"the sandbox 'none' lets programs do whatever you can; set {PERMISSION}=1 to allow that"
            )
        self.python = python or sys.executable
        self.layers: Mapping[str, bool] = {}

    def open(self, workspace: Path | None, limits: Limits) -> NoJail:
        """Raises UsageError for a workspace that cannot be read."""
        check_limits(limits)
        environment = minimal_environment(f"{os.path.dirname(self.python)}:{os.defpath}")
        return NoJail(limits, self.python, environment).filled(workspace)


class NoJail(FolderJail):
    @property
    def _state_inside(self) -> str:
        return self._ours

    def _execute(self, program: ProgramSpec) -> ProgramResult:
        try:
            process = subprocess.Popen(
                program.argv, cwd=self._work, env=program.env, stdin=program.stdin, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return _never_started(program, error)
        with self._ended_by(lambda: _kill_group(process.pid)):
            drain = _collect(process, program)
        code = process.wait()
        return ProgramResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=drain.timed_out and code < 0,
        )


def _collect(process: subprocess.Popen[bytes], program: ProgramSpec) -> Drain:
    """Collect output until the process ends; then kill the rest of its process group."""
    assert process.stdout is not None
    assert process.stderr is not None
    ended = os.pidfd_open(process.pid)
    with process.stdout, process.stderr:
        streams = {process.stdout.fileno(): program.out, process.stderr.fileno(): program.err}
        drain = Drain(streams, ended, FLOOD_BYTES)
        drain.run(program.timeout, lambda: _kill_group(process.pid))
        _kill_group(process.pid)
        drain.finish()
    os.close(ended)
    return drain


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _never_started(program: ProgramSpec, error: OSError) -> ProgramResult:
    """The message and exit code of a shell for a program that cannot be run."""
    said = f"cannot run {program.argv[0]!r}: {error.strerror}\n"
    program.err.feed(said.encode(errors="backslashreplace"))
    return ProgramResult(exit_code=127 if error.errno == errno.ENOENT else 126)
