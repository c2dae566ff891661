"""One program under bubblewrap, from its start to the death of everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_coder.sandbox import bubblewrap_program as bubblewrap
from nano_coder.sandbox.captured_output import FLOOD_BYTES, Drain
from nano_coder.sandbox.folder_jail import Ending, Program
from nano_coder.sandbox.launcher import private_mounts, root
from nano_coder.sandbox.request import seal
from nano_shared.errors import SandboxError

_START = (
    "import sys; sys.path.insert(0, {path!r}); from launcher import single_program; single_program.main{fds}"
)
_STAGE = (
    "import sys; sys.path.insert(0, {path!r}); from launcher import private_mounts; private_mounts.main{call}"
)
_LONGEST_INFO = 1 << 16


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What the runs of one sandbox have in common."""

    program: str
    """bubblewrap"""
    plan: dict[str, Any]
    """of the root"""
    python: str
    """the interpreter's path inside"""
    owner: int | None
    """uid and gid on the host where we are root"""
    staged: bool
    """that user cannot reach everything that the plan shows"""


class Wrapped:
    """A started program. Whatever happens, `stack` ends it."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        wrapper: Wrapper,
        work: str,
        program: Program,
        confinement: dict[str, Any],
    ) -> None:
        """`confinement`: rlimits and memory. Raises SandboxError, with bubblewrap's words, where it fails."""
        self._program = program
        pipes = _Pipes(stack)
        with pipes.theirs:
            asked = pipes.hand_over(
                json.dumps({"argv": program.argv, "env": program.env, **confinement}).encode()
            )
            self._report, report = pipes.from_inside()
            self._stop, stop = pipes.to_inside()
            info, info_inside = pipes.from_inside()
            block, block_inside = pipes.to_inside()
            self._out, out = pipes.from_inside()
            self._err, err = pipes.from_inside()
            plan, sources = wrapper.plan, [*(source for source, _ in wrapper.plan["binds"]), work]
            if wrapper.staged:
                targets = [target for _, target in plan["binds"]]
                plan = {
                    **plan,
                    "binds": [(private_mounts.staged(n), target) for n, target in enumerate(targets)],
                }
                work = private_mounts.staged(len(targets))
            options = bubblewrap.options(plan, work, pipes.hand_over)
            options += ["--info-fd", str(info_inside), "--block-fd", str(block_inside)]
            arguments = pipes.hand_over(bubblewrap.encode(options))
            start = _START.format(path=root.LAUNCHER_INSIDE, fds=(asked, report, stop))
            inside = [wrapper.python, "-I", "-S", "-X", "utf8", "-c", start]
            argv = [wrapper.program, "--args", str(arguments), "--", *inside]
            if wrapper.staged:
                code = _STAGE.format(path=str(Path(__file__).parent), call=(wrapper.owner, sources, argv))
                argv = [sys.executable, "-I", "-S", "-X", "utf8", "-c", code]
            self._process = _popen(
                argv,
                None if wrapper.staged else wrapper.owner,
                streams=(program.stdin, out, err),
                inherited=pipes.handed,
            )
        stack.callback(self._reap)
        self._init = self._hold(info)
        stack.callback(os.close, self._init)
        stack.callback(self._end_and_wait)
        # only now, so that the pid is still that of the process we hold
        with contextlib.suppress(BrokenPipeError):
            os.write(block, b"1")

    def _hold(self, info: int) -> int:
        """A pidfd of the jail's pid 1, which waits for us."""
        said = b""
        while b"}" not in said and len(said) < _LONGEST_INFO and (chunk := os.read(info, 4096)):
            said += chunk
        try:
            return os.pidfd_open(json.loads(said)["child-pid"])
        except (ValueError, ProcessLookupError) as error:
            self._process.wait()
            Drain({self._err: self._program.err}, self._err).finish()
            raise self._failed() from error

    def _failed(self) -> SandboxError:
        words = self._program.err.value().decode(errors="backslashreplace").strip() or "it said nothing"
        return SandboxError(f"bubblewrap does not start the jail ({words[-300:]})")

    def collect(self) -> Ending:
        """Take output until everything is dead, at the latest some seconds after the time limit."""
        drain = Drain({self._out: self._program.out, self._err: self._program.err}, self._init, FLOOD_BYTES)
        if not drain.run(self._program.timeout, self._ask_to_stop):
            # a program that stopped our process inside does not stop this
            self._end_and_wait()
            drain.finish()
        self._process.wait()
        with open(self._report, "rb", closefd=False) as file:
            records = [json.loads(line) for line in file]
        if not records:
            raise self._failed()
        # without a last word our process was killed: by us, or by the program
        ending = {"exit_code": None, "signal": signal.SIGKILL.value, **records[-1]}
        ending.pop("began", None)
        return Ending(**ending, timed_out=drain.timed_out and ending["exit_code"] is None)

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stop, b"1")

    def end(self) -> None:
        """Kill pid 1, and with it everything inside. From any thread, until the stack is left."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def _end_and_wait(self) -> None:
        self.end()
        poll = select.poll()
        poll.register(self._init, select.POLLIN)
        poll.poll(Drain.PATIENCE_S * 1000)

    def _reap(self) -> None:
        self._process.kill()
        self._process.wait()


def _popen(
    argv: list[str], owner: int | None, *, streams: tuple[int, int, int], inherited: list[int]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            # its pid 1 would show ours to whatever runs beside it
            env={},
            cwd="/",
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=inherited,
            user=owner,
            group=owner,
            extra_groups=None if owner is None else [],
            umask=0o022,
        )
    except OSError as error:
        raise SandboxError(f"cannot start {argv[0]} as uid {owner or os.geteuid()}: {error}") from error


class _Pipes:
    """File descriptors that bubblewrap inherits, and our ends of pipes."""

    def __init__(self, ours: contextlib.ExitStack) -> None:
        self._ours = ours
        self.theirs = contextlib.ExitStack()
        """to be left once bubblewrap has them"""
        self.handed: list[int] = []

    def hand_over(self, data: bytes) -> int:
        return self._hand(seal(data))

    def from_inside(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._ours.callback(os.close, reading)
        return reading, self._hand(writing)

    def to_inside(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._ours.callback(os.close, writing)
        return writing, self._hand(reading)

    def _hand(self, fd: int) -> int:
        self.theirs.callback(os.close, fd)
        self.handed.append(fd)
        return fd
