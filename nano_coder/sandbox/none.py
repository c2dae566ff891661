"""No isolation at all: a subprocess in a private copy, for machines that cannot isolate and say so.

It keeps the contract of the other backends (private copy, time limit, output cap) but a program can read
and write whatever the user can. Refused unless NANO_ALLOW_NO_SANDBOX=1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Unpack

from nano_coder.sandbox.launcher import files
from nano_coder.sandbox.output import FLOOD_BYTES, Drain, Output
from nano_coder.sandbox.protocol import ExecResult, RunOptions
from nano_coder.sandbox.request import check_limits, check_run, minimal_environment, python_program
from nano_coder.sandbox.workspace import pack_workspace
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

PERMISSION = "NANO_ALLOW_NO_SANDBOX"


class NoSandbox:
    name = "none"

    def __init__(self, python: str | None = None) -> None:
        """Raises SandboxError unless the environment allows to run unconfined."""
        if os.environ.get(PERMISSION) != "1":
            raise SandboxError(
                f"the sandbox 'none' lets programs do whatever you can; set {PERMISSION}=1 to allow that"
            )
        self.python = python or sys.executable
        self.layers: Mapping[str, bool] = {}

    def open(self, workspace: Path | None, limits: Limits) -> NoJail:
        """Raises UsageError for a workspace that cannot be read."""
        check_limits(limits)
        jail = NoJail(limits, self.python)
        if workspace is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(jail.close)
                with pack_workspace(Path(workspace)).stream as stream:
                    jail.restore(stream.read())
                stack.pop_all()
        return jail


class NoJail:
    def __init__(self, limits: Limits, python: str) -> None:
        self._limits = limits
        self._python = python
        self._folder = tempfile.mkdtemp(prefix="nano-jail-")
        self._work = os.path.join(self._folder, "work")
        os.mkdir(self._work)
        self._search_path = f"{os.path.dirname(python)}:{os.defpath}"

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
        environment = {**minimal_environment(self._search_path), **env}
        out, err = Output(cap), Output(cap)
        started = time.monotonic()
        with self._root(), tempfile.TemporaryFile() as given:
            given.write(options.get("stdin", b""))
            given.seek(0)
            try:
                process = subprocess.Popen(
                    list(argv),
                    cwd=self._work,
                    env=environment,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                return _never_started(argv[0], error)
        drain = _wait(process, out, err, wall)
        code = process.returncode
        return ExecResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=drain.timed_out and code < 0,
            oom=False,
            stdout=out.value(),
            stderr=err.value(),
            stdout_bytes=out.size,
            stderr_bytes=err.size,
            wall_s=time.monotonic() - started,
        )

    def read(self, path: str) -> bytes:
        with self._root() as root, tempfile.TemporaryFile() as out:
            files.read(root, path, out.fileno())
            out.seek(0)
            return out.read()

    def write(self, path: str, data: bytes) -> None:
        with self._root() as root, tempfile.TemporaryFile() as source:
            source.write(data)
            source.seek(0)
            files.write(root, path, source.fileno())

    def snapshot(self) -> bytes:
        out = BytesIO()
        files.pack(self._work, out)
        return out.getvalue()

    def restore(self, snapshot: bytes) -> None:
        """Replace the workspace by what a snapshot holds."""
        with self._root() as root:
            files.clear(self._work)
            files.unpack(root, BytesIO(snapshot))

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        if not os.path.isdir(self._work):
            raise SandboxError("the jail is closed: open another")
        root = os.open(self._work, os.O_PATH | os.O_DIRECTORY)
        try:
            yield root
        finally:
            os.close(root)

    def close(self) -> None:
        if os.path.isdir(self._folder):
            files.clear(self._folder)
            os.rmdir(self._folder)


def _wait(process: subprocess.Popen[bytes], out: Output, err: Output, timeout: float) -> Drain:
    """Collect output until the process ends; then end whatever is left of its process group."""
    assert process.stdout is not None
    assert process.stderr is not None
    ended = os.pidfd_open(process.pid)
    with process.stdout, process.stderr:
        drain = Drain({process.stdout.fileno(): out, process.stderr.fileno(): err}, ended, FLOOD_BYTES)
        drain.run(timeout, lambda: _kill_group(process.pid))
        _kill_group(process.pid)
        drain.finish()
    process.wait()
    os.close(ended)
    return drain


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _never_started(program: str, error: OSError) -> ExecResult:
    """What a shell says and returns for a program that cannot be run."""
    said = f"cannot run {program!r}: {error.strerror}\n".encode(errors="backslashreplace")
    return ExecResult(
        exit_code=127 if error.errno == errno.ENOENT else 126,
        signal=None,
        timed_out=False,
        oom=False,
        stdout=b"",
        stderr=said,
        stdout_bytes=0,
        stderr_bytes=len(said),
        wall_s=0.0,
    )
