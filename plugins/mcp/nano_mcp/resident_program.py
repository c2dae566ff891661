"""A program that stays alive between calls, in a jail of its own, with its standard streams in our hands.

A jail serves one request at a time and keeps no process after it, so the program gets a jail of its own, and
its workspace is made equal to the run's before a call and carried back after it. Everything that comes from
that jail is untrusted: frames are bounded, and its files are unpacked in the run's jail, never here.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import inspect
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

from nano_coder.sandbox.jail_request import WEEK_S
from nano_coder.sandbox.protocol import ExecResult, Jail
from nano_mcp import resident_inside
from nano_mcp.resident_inside import MESSAGE, WORKSPACE, Channel
from nano_shared.errors import SandboxError
from nano_shared.snapshot import SnapshotError

_SOURCE = inspect.getsource(resident_inside)
_SERVE = f"{_SOURCE}\n\nmain()\n"
_UNPACK = f"{_SOURCE}\n\nFolder(os.getcwd()).unpack(sys.stdin.buffer.read())\n"
_CARRY_S = 120.0
_SEND_S = 30
_PATIENCE_S = 10.0
_LAST_WORDS = 500
"""characters of the last line of standard error that are told"""


class ResidentProgram:
    """One program, whose output a thread of its own passes on. Methods may be called from any thread."""

    def __init__(
        self, jail: Jail, argv: Sequence[str], *, environment: Mapping[str, str],
        on_output: Callable[[bytes], None], on_end: Callable[[str], None], cwd: str | None = None,
        workspace: Jail | None = None,
    ) -> None:  # fmt: skip
        """Takes over `jail`, and starts the program there on the files of `workspace` (None: on none).
        `on_output` gets what it writes to standard output, `on_end` once how it ended."""
        self._jail, self._workspace = jail, workspace
        self._on_output, self._on_end = on_output, on_end
        self._known = ""
        """hash of the workspace that both jails hold"""
        self._packed: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        # so that a program that does not read its input blocks nobody for ever
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._channel = Channel(ours)
        self._over: ExecResult | SandboxError | None = None
        self._ended: concurrent.futures.Future[str] = concurrent.futures.Future()
        start = {"argv": list(argv), "env": dict(environment), "cwd": cwd, "workspace": workspace is not None}
        self._running = threading.Thread(target=self._run, args=(theirs, start), daemon=True)
        self._running.start()
        self._reading = threading.Thread(target=self._read, name="resident", daemon=True)
        self._reading.start()
        if workspace is not None:
            self._send(WORKSPACE, self._taken(workspace))

    def send(self, data: bytes) -> None:
        """Write to the program's standard input. Raises SandboxError for one that has ended."""
        self._send(MESSAGE, data)

    def push_files(self) -> None:
        """Make the program's files those of the run, if they have changed. Raises SandboxError."""
        if self._workspace is not None:
            before, packed = self._known, self._taken(self._workspace)
            if self._known != before:
                self._send(WORKSPACE, packed)

    def pull_files(self) -> None:
        """Make the run's files those of the program, if it has changed any. Raises SandboxError."""
        if self._workspace is None:
            return
        self._send(WORKSPACE, b"")
        try:
            packed = self._packed.get(timeout=_CARRY_S)
        except queue.Empty:
            raise SandboxError(f"its files did not come within {_CARRY_S:g} s") from None
        if packed is None:
            raise SandboxError("it ended before its files were carried over")
        if packed:
            done = self._workspace.run_python(_UNPACK, isolated=True, stdin=packed, timeout=_CARRY_S)
            if not done.ok:
                raise SandboxError(f"its files cannot be carried over: {_last_line(done.stderr)}")
            self._taken(self._workspace)

    def close(self) -> None:
        """End the program and close its jail. Idempotent."""
        self._channel.hang_up()
        self._jail.close()
        self._reading.join(2 * _PATIENCE_S)

    def _run(self, theirs: socket.socket, start: dict[str, object]) -> None:
        try:
            with theirs:
                self._over = self._jail.run_python(
                    _SERVE, [json.dumps(start)], isolated=True, stdin=theirs.fileno(), timeout=WEEK_S
                )
        except SandboxError as problem:
            self._over = problem
        finally:
            self._channel.hang_up()

    def _read(self) -> None:
        said = b""
        while (frame := self._channel.receive()) is not None:
            kind, data = frame
            if kind == MESSAGE:
                self._on_output(data)
            elif kind == WORKSPACE:
                self._packed.put(data)
            else:
                said = data
                break
        self._channel.hang_up()
        self._running.join(_PATIENCE_S)
        self._packed.put(None)
        self._ended.set_result(self._reason(said))
        self._on_end(self._ended.result())
        self._jail.close()
        self._channel.close()

    def _reason(self, said: bytes) -> str:
        over = self._over
        if isinstance(over, ExecResult) and over.oom:
            return "it ran out of memory"
        told = said.decode("utf-8", "backslashreplace")
        if isinstance(over, ExecResult):
            words = _last_line(over.stderr)
            told = told or (f"it was killed by signal {over.signal}" if over.signal else "it was ended")
            return f"{told} ({words})" if words else told
        return told or "it was ended"

    def _taken(self, workspace: Jail) -> bytes:
        try:
            packed = workspace.snapshot()
        except SnapshotError as problem:
            raise SandboxError(str(problem)) from None
        self._known = hashlib.sha256(packed).hexdigest()
        return packed

    def _send(self, kind: bytes, data: bytes) -> None:
        try:
            self._channel.send(kind, data)
        except BlockingIOError:
            self._channel.hang_up()  # half a frame may be on its way
            raise SandboxError(f"it read nothing for {_SEND_S} s") from None
        except OSError:
            raise SandboxError(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        """Why the program is no more, which its reader learns a moment after its channel broke."""
        try:
            return self._ended.result(_PATIENCE_S)
        except concurrent.futures.TimeoutError:
            return "it has ended"


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "backslashreplace").strip().splitlines()
    return lines[-1][-_LAST_WORDS:] if lines else ""
