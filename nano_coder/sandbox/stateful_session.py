"""Stateful sessions: Python or a shell that keeps its state between requests, in a jail of its own.

Answers are length-prefixed JSON with the nonce of the request, read within a size cap. The session's code
shares a process (Python) or a user (shell) with the code that answers, so it can lie about itself, as any
program can about its exit code; an unexpected answer ends the session with an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nano_coder.sandbox.captured_output import FLOOD_BYTES, AnswerDrain, Drain, Output, captured
from nano_coder.sandbox.kept_processes import serving
from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.launcher.root import LAUNCHER_INSIDE
from nano_coder.sandbox.launcher_process import readable
from nano_coder.sandbox.namespaces import NsJail
from nano_coder.sandbox.protocol import ExecResult
from nano_coder.sandbox.request import check_run, seal
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

SessionKind = Literal["python", "shell"]
_SOURCE = (
    f"import sys; sys.path.insert(0, {LAUNCHER_INSIDE!r}); from launcher.session import serve; "
    f"sys.path.remove({LAUNCHER_INSIDE!r}); serve({{kind!r}})"
)
LONGEST_ANSWER = 4096
"""bytes of JSON in one answer"""
_PATIENCE_S = 10.0


class Answer(BaseModel):
    """The inside's report of the end of a request; validated, since the session's code may have forged it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    nonce: str
    exit_code: int | None = Field(None, ge=0, le=255)
    signal: int | None = Field(None, ge=1, le=64)
    ended: bool = False
    """whether the program ended the session"""
    cpu_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    peak_bytes: int = Field(0, ge=0)
    refused: list[str] | None = Field(None, min_length=2, max_length=2)
    """path and reason of a file that could not be written; None if all were"""


class Session:
    """A session. Requests are served one at a time; `close` may be called from any thread."""

    def __init__(self, jail: NsJail, kind: SessionKind, limits: Limits) -> None:
        """Takes over `jail`. Raises SandboxError if the jail is gone."""
        self.kind = kind
        self.lost: str | None = None
        """why the state was lost; None while the session lives"""
        self._jail = jail
        self._limits = limits
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        (self._out, out), (self._err, err) = os.pipe(), os.pipe()
        self._over = serving(lambda channel: jail.occupy(_SOURCE.format(kind=kind), channel), theirs)
        try:
            message.send(self._channel, {}, [out, err])
        except OSError as error:
            self.close()
            raise SandboxError(f"the session could not begin ({error}); open another") from error
        finally:
            os.close(out)
            os.close(err)

    def run(
        self,
        source: str,
        *,
        stdin: bytes = b"",
        files: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        """Run source with the state of earlier requests. `files` are written to the workspace first.

        After a request that ended the session (exit, deadline, memory, too much output) `lost` says why.
        Raises SandboxError for a lost session or an unexpected answer, OSError for a file that cannot be
        written, UsageError for source that no shell can be given.
        """
        wall = self._limits.tool_seconds if timeout is None else timeout
        check_run([self.kind], {}, wall, self._limits.output_bytes)
        if self.kind == "shell" and "\0" in source:
            raise UsageError("the text holds a NUL byte, which no shell takes")
        with self._lock:
            if self.lost is not None:
                raise SandboxError(f"{self.lost}; its state is gone")
            finished = False
            try:
                result = self._run(source, stdin, dict(files or {}), wall)
                finished = True
            finally:
                if self.lost is not None or not finished:
                    self._end()
        return result

    def _run(self, source: str, stdin: bytes, files: dict[str, str], wall: float) -> ExecResult:
        started = time.monotonic()
        out, err = Output(self._limits.output_bytes), Output(self._limits.output_bytes)
        drain = AnswerDrain({self._out: out, self._err: err}, self._channel.fileno(), FLOOD_BYTES)
        nonce = secrets.token_hex(16)
        if self._speaks() and not self._hung_up():
            raise self._broken()
        answer: Answer | None = None
        if self._ask({"nonce": nonce, "source": source, "files": files}, stdin, wall):
            left = max(0.001, wall - (time.monotonic() - started))
            if not drain.run(left, self._jail.close):
                raise SandboxError("a jail did not end a session within its patience")
            if not (drain.timed_out or drain.flooded):
                answer = self._answer(nonce)
        else:
            drain.timed_out = True
            self._jail.close()
        if answer is not None and answer.refused is not None:
            raise OSError(0, answer.refused[1], answer.refused[0])
        ending = self._ending(drain, answer)
        return captured(out, err, started, **ending)

    def _ask(self, request: dict[str, Any], stdin: bytes, wall: float) -> bool:
        """Send the request. False if the session does not take it in time."""
        given = seal(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._channel.settimeout(wall)
        try:
            message.send(self._channel, request, [given])
        except TimeoutError:
            return False
        except OSError:
            pass  # it ended: the missing answer shows that
        finally:
            self._channel.settimeout(None)
            os.close(given)
        return True

    def _answer(self, nonce: str) -> Answer | None:
        """The answer to the request; None if the program has ended."""
        data = bytearray()
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big") <= 4 + LONGEST_ANSWER:
            if not readable(self._channel, _PATIENCE_S):
                raise self._broken()
            try:
                # recv and not recvmsg: the kernel then drops descriptors that come with the data
                chunk = self._channel.recv(LONGEST_ANSWER + 5)
            except ConnectionResetError:
                chunk = b""
            if not chunk and not data:
                return None
            if not chunk:
                raise self._broken()
            data += chunk
        answer = parse_answer(bytes(data))
        if answer is None or answer.nonce != nonce:
            raise self._broken()
        return answer

    def _ending(self, drain: Drain, answer: Answer | None) -> dict[str, Any]:
        """How the request ended, as ExecResult fields; sets `lost` if the session ended too."""
        killed = {"exit_code": None, "signal": 9, "timed_out": drain.timed_out, "oom": False}
        if drain.timed_out:
            self.lost = "the session was ended at the deadline of its last request"
            return killed
        if drain.flooded:
            self.lost = f"the session wrote more than {FLOOD_BYTES >> 20} MB for one request and was ended"
            return killed
        if answer is None:
            over = self._outcome()
            self.lost = "the session ran out of memory and was ended" if over.oom else _ended(over)
            fields = ("exit_code", "signal", "oom", "cpu_s", "peak_bytes")
            return {**{name: getattr(over, name) for name in fields}, "timed_out": False}
        if answer.ended:
            self.lost = _ended(answer)
        used = {"cpu_s": answer.cpu_s, "peak_bytes": answer.peak_bytes}
        return {
            "exit_code": answer.exit_code, "signal": answer.signal, "timed_out": False, "oom": False, **used
        }  # fmt: skip

    def _outcome(self) -> RequestOutcome:
        try:
            return self._over.result(_PATIENCE_S)
        except (SandboxError, NotYet) as error:
            self.lost = "the session's jail was ended"
            raise SandboxError(f"{self.lost} ({error})") from error

    def _speaks(self) -> bool:
        return readable(self._channel)

    def _hung_up(self) -> bool:
        """Whether the other side has closed the socket without sending anything unexpected."""
        with contextlib.suppress(ConnectionResetError):
            return self._channel.recv(1, socket.MSG_PEEK) == b""
        return True

    def _broken(self) -> SandboxError:
        self.lost = "the session answered out of turn and was ended"
        return SandboxError(f"{self.lost}: its own code wrote on our connection; its state is gone")

    def close(self) -> None:
        """End the program and close its jail. Idempotent."""
        # wakes a request in progress
        self._jail.close()
        with self._lock:
            self.lost = self.lost or "the session is closed"
            self._end()

    def _end(self) -> None:
        self.lost = self.lost or "the session was interrupted"
        self._jail.close()
        self._channel.close()
        for name in ("_out", "_err"):
            if (fd := getattr(self, name)) >= 0:
                os.close(fd)
                setattr(self, name, -1)


def parse_answer(data: bytes) -> Answer | None:
    """The message if `data` is exactly one, else None."""
    size = int.from_bytes(data[:4], "big")
    if size > LONGEST_ANSWER or len(data) != 4 + size:
        return None
    try:
        # parsed before validation: pydantic's JSON parser is strict about numbers, but accepts NaN
        return Answer.model_validate(json.loads(data[4:]))
    except (ValueError, ValidationError, RecursionError):
        return None


def _ended(over: RequestOutcome | Answer) -> str:
    how = f"signal {over.signal}" if over.signal is not None else f"exit code {over.exit_code}"
    return f"the session's program ended ({how})"
