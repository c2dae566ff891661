"""The sessions of a batch: requests of one name run in their order, in one jail, until it is closed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from nano_coder.sandbox import ExecResult, Sandbox
from nano_coder.sandbox.ns import NsSandbox
from nano_coder.sandbox.session import Kind, Session
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

MOST_OPEN = 64
"""each holds a jail"""


class InOrder:
    """Jobs of one name run one after another, as they came, in one worker at a time."""

    def __init__(self, start: Callable[[Callable[[], None]], object]) -> None:
        """`start` runs what it is given, some time, in some thread."""
        self._start = start
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def add(self, name: str, job: Callable[[], None]) -> None:
        with self._lock:
            waiting = self._waiting.get(name)
            if waiting is not None:
                waiting.append(job)
                return
            self._waiting[name] = deque([job])
        self._start(lambda: self._work(name))

    def _work(self, name: str) -> None:
        while True:
            with self._lock:
                if not self._waiting[name]:
                    del self._waiting[name]
                    return
                job = self._waiting[name].popleft()
            job()


class SessionLost(SandboxError):
    """The state that a request counts on is gone; told once, then the name is free again."""


class Sessions:
    """Safe to use from many threads, as long as each name is used by one at a time."""

    def __init__(self, sandbox: Sandbox, workspace: Path | None) -> None:
        self._sandbox = sandbox
        self._workspace = workspace
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}
        self._limits: dict[str, Limits] = {}

    def run(
        self,
        name: str,
        kind: Kind,
        source: str,
        limits: Limits,
        *,
        memory_mb: int | None,
        stdin: bytes,
        files: dict[str, str],
    ) -> tuple[ExecResult, str | None]:
        """What became of the request, and why the session is gone, if it ended with it.

        The first request opens the session with `limits`, whose memory stays; `memory_mb` is what a request
        asks for itself. Raises SessionLost where an earlier request, or something between the two, ended it.
        """
        session = self._opened(name, kind, limits)
        if session.kind != kind:
            raise UsageError(f"session {name!r} is a {session.kind} session: it takes {session.kind!r}")
        if memory_mb not in (None, self._limits[name].memory_mb):
            raise UsageError(f"the memory of session {name!r} is set by its first request; leave it out")
        lost_before = session.lost is not None
        try:
            return session.run(source, stdin=stdin, files=files, timeout=limits.tool_seconds), session.lost
        except SandboxError as error:
            self._forget(name)
            told = str(error) if lost_before else f"{error}, before it answered this request"
            raise SessionLost(f"session {name!r}: {told}; the name is free for a new one") from error

    def _opened(self, name: str, kind: Kind, limits: Limits) -> Session:
        with self._lock:
            session, count = self._open.get(name), len(self._open)
        if session is not None:
            return session
        if not isinstance(self._sandbox, NsSandbox):
            raise UsageError(f"the sandbox {self._sandbox.name!r} has no sessions; use --sandbox ns")
        if count >= MOST_OPEN:
            raise UsageError(f"{MOST_OPEN} sessions are open: close one first")
        session = Session(self._sandbox.open(self._workspace, limits), kind, limits)
        with self._lock:
            self._open[name], self._limits[name] = session, limits
        return session

    def close(self, name: str) -> None:
        """End a session, lost or not. Raises UsageError for a name that is not open."""
        if name not in self._open:
            raise UsageError(f"no session {name!r} is open")
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            session = self._open.pop(name)
            del self._limits[name]
        session.close()

    def close_all(self) -> None:
        for name in list(self._open):
            self._forget(name)
