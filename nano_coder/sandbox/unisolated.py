"""The backend `none`: a subprocess in a private copy of the workspace, without isolation.

It keeps the contract of the other backends (private copy, time limit, output cap), but a program can read and
write whatever the user can. Refused unless NANO_ALLOW_NO_SANDBOX=1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nano_coder.sandbox.folder_jail import FolderJail, ProgramResult, ProgramSpec
from nano_coder.sandbox.request import FLOOD_BYTES, Drain, check_limits, minimal_environment
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

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
                program.argv,
                cwd=self._work,
                env=program.env,
                stdin=program.stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
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
