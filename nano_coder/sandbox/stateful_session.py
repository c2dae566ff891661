"""Stateful sessions: Python or a shell that keeps its state between requests, in a jail of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Literal

from nano_coder.sandbox.captured_output import FLOOD_BYTES, Drain, Output, captured
from nano_coder.sandbox.jail_server import JailServer, OutOfTurn
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.namespaces import NsJail
from nano_coder.sandbox.protocol import ExecResult
from nano_coder.sandbox.request import check_run, opened
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

SessionKind = Literal["python", "shell"]


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
        (self._out, out), (self._err, err) = os.pipe(), os.pipe()
        try:
            self._server = JailServer(jail.occupy, "session", repr(kind), streams=[out, err])
        except SandboxError:
            jail.close()
            os.close(self._out)
            os.close(self._err)
            raise
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
        request = {"source": source, "files": files}
        pipes = {self._out: out, self._err: err}
        try:
            with opened(stdin) as given:
                reply, drain = self._server.ask(
                    request, pipes, given=[given], timeout=wall, flood=FLOOD_BYTES, kill=self._jail.close
                )
        except OutOfTurn:
            self.lost = "the session answered out of turn and was ended"
            raise SandboxError(
                f"{self.lost}: its own code wrote on our connection; its state is gone"
            ) from None
        except SandboxError as error:
            self.lost = "the session's jail was ended"
            raise SandboxError(f"{self.lost} ({error})") from error
        if reply.refused is not None:
            name, _, reason = reply.refused[1].rpartition(": ")
            raise OSError(reply.refused[0], reason, name)
        self.lost = self._why_lost(drain, reply)
        return captured(
            out, err, started, exit_code=reply.exit_code, signal=reply.signal, timed_out=drain.timed_out,
            oom=reply.oom, cpu_s=reply.cpu_s, peak_bytes=reply.peak_bytes,
        )  # fmt: skip

    def _why_lost(self, drain: Drain, reply: RequestOutcome) -> str | None:
        if drain.timed_out:
            return "the session was ended at the deadline of its last request"
        if drain.flooded:
            return f"the session wrote more than {FLOOD_BYTES >> 20} MB for one request and was ended"
        if reply.oom:
            return "the session ran out of memory and was ended"
        if not reply.ended and self._server.end is None:
            return None
        how = f"signal {reply.signal}" if reply.signal is not None else f"exit code {reply.exit_code}"
        return f"the session's program ended ({how})"

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
        self._server.close()
        for name in ("_out", "_err"):
            if (fd := getattr(self, name)) >= 0:
                os.close(fd)
                setattr(self, name, -1)
