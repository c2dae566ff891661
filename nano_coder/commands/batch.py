"""`nano-coder exec --batch`: one JSON request a line, answered as it finishes.

Each has a jail of its own, or shares one with the other requests of its session.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from nano_coder.sandbox.protocol import Jail, RunOptions, Sandbox, SupportsKeeping
from nano_coder.sandbox.request import TERABYTE_MB, WEEK_S
from nano_shared.errors import NanoError, UsageError
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


class Sessions:
    """Jails by name, whose files and processes stay. Safe to use from many threads, as long as each name is
    used by one at a time."""

    def __init__(self, sandbox: Sandbox, workspace: Path | None) -> None:
        self._sandbox = sandbox
        self._workspace = workspace
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Jail, Limits]] = {}

    def jail(self, name: str, limits: Limits, memory_mb: int | None) -> Jail:
        """Its jail. The first request opens it with `limits`, whose memory stays; `memory_mb` is what
        a request asks for itself."""
        with self._lock:
            known, count = self._open.get(name), len(self._open)
        if known is not None:
            if memory_mb not in (None, known[1].memory_mb):
                raise UsageError(f"the memory of session {name!r} is set by its first request; leave it out")
            return known[0]
        if count >= MOST_OPEN:
            raise UsageError(f"{MOST_OPEN} sessions are open: close one first")
        jail = self._sandbox.open(self._workspace, limits)
        if not (isinstance(jail, SupportsKeeping) and jail.keep()):
            jail.close()
            raise UsageError(f"the sandbox {self._sandbox.name!r} has no sessions; use --sandbox ns")
        with self._lock:
            self._open[name] = jail, limits
        return jail

    def close(self, name: str) -> None:
        """End a session. Raises UsageError for a name that is not open."""
        with self._lock:
            known = self._open.pop(name, None)
        if known is None:
            raise UsageError(f"no session {name!r} is open")
        known[0].close()

    def close_all(self) -> None:
        for name in list(self._open):
            self.close(name)


_LONGEST_LINE = 32 << 20
_BAD_INPUT = 2
_WAITING = 4
"""requests read ahead, a worker"""


class Request(BaseModel):
    """One line of the input."""

    model_config = ConfigDict(extra="forbid")

    id: JsonValue = None
    python: str | None = None
    shell: str | None = None
    argv: list[str] | None = Field(None, min_length=1)
    stdin: str = ""
    files: dict[str, str] = {}
    timeout: float | None = Field(None, gt=0, le=WEEK_S, allow_inf_nan=False)
    memory: int | None = Field(None, ge=16, le=TERABYTE_MB)
    """MB"""
    session: str | None = Field(None, min_length=1, max_length=200)
    """whose files and processes it works with; the first request of a name opens it"""
    close: bool = False

    @model_validator(mode="after")
    def _one_program(self) -> Request:
        if self.close:
            if self.session is None or self.model_fields_set - {"id", "session", "close"}:
                raise ValueError("close takes a session and nothing else")
            return self
        if sum(program is not None for program in (self.python, self.shell, self.argv)) != 1:
            raise ValueError("give exactly one of python, shell and argv")
        return self


def answer_all(
    lines: IO[bytes], out: IO[str], sandbox: Sandbox, workspace: Path | None, limits: Limits, concurrency: int
) -> int:
    """Answer every line; 2 when some line was no request, else 0."""
    writing, slots = threading.Lock(), threading.Semaphore(_WAITING * concurrency)
    bad = threading.Event()
    sessions = Sessions(sandbox, workspace)

    def serve(line: bytes) -> None:
        try:
            said = _answer(line, sandbox, workspace, limits, sessions)
        finally:
            slots.release()
        if "error" in said:
            bad.set()
        with writing:
            out.write(json.dumps(said) + "\n")
            out.flush()

    with ExitStack() as stack, ThreadPoolExecutor(concurrency) as workers:
        stack.callback(sessions.close_all)
        futures: list[Future[None]] = []
        in_order = InOrder(lambda job: futures.append(workers.submit(job)))
        while line := lines.readline(_LONGEST_LINE):
            if line.strip():
                slots.acquire()
                name = _session(line)
                if name is None:
                    futures.append(workers.submit(serve, line))
                else:
                    in_order.add(name, partial(serve, line))
        for future in futures:
            future.result()
    return _BAD_INPUT if bad.is_set() else 0


def _answer(
    line: bytes, sandbox: Sandbox, workspace: Path | None, limits: Limits, sessions: Sessions
) -> dict[str, Any]:
    try:
        request = Request.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "request"
        return {"id": _id(line), "error": f"{where}: {first['msg'].removeprefix('Value error, ')}"}
    changes = {"tool_seconds": request.timeout, "memory_mb": request.memory}
    wanted = limits.model_copy(update={k: v for k, v in changes.items() if v is not None})
    try:
        if request.session is None:
            with closing(sandbox.open(workspace, wanted)) as jail:
                return {"id": request.id, **_run(request, jail, wanted)}
        known = {"id": request.id, "session": request.session}
        if request.close:
            sessions.close(request.session)
            return {**known, "closed": True}
        return {**known, **_run(request, sessions.jail(request.session, wanted, request.memory), wanted)}
    except OSError as problem:
        return {"id": request.id, "error": f"files: {problem.filename}: {problem.strerror}"}
    except NanoError as problem:
        return {"id": request.id, "error": str(problem)}


def _run(request: Request, jail: Jail, limits: Limits) -> dict[str, object]:
    for name, text in request.files.items():
        jail.write(name, text.encode("utf-8", "surrogatepass"))
    options: RunOptions = {
        "stdin": request.stdin.encode("utf-8", "surrogatepass"), "timeout": limits.tool_seconds,
    }  # fmt: skip
    if request.python is not None:
        return jail.run_python(request.python, **options).as_json()
    argv = request.argv if request.argv is not None else ["/bin/sh", "-c", str(request.shell)]
    return jail.run(argv, **options).as_json()


def _session(line: bytes) -> str | None:
    """The name whose turn the line waits for."""
    # most lines have none, and are parsed by a worker
    name = _field(line, "session") if b"session" in line else None
    return name if isinstance(name, str) else None


def _id(line: bytes) -> JsonValue:
    """The id of a line that is no request, where it can be read."""
    return _field(line, "id")


def _field(line: bytes, name: str) -> JsonValue:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found.get(name) if isinstance(found, dict) else None
