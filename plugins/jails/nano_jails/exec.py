"""`nano-coder exec`: one command in the sandbox with the program's own exit code, or many as a batch."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from typer import Argument, Option

from nano_coder.sandbox.jail_request import FLOOD_BYTES, TERABYTE_MB, WEEK_S
from nano_coder.sandbox.namespaces import NsJail
from nano_coder.sandbox.protocol import (
    ExecResult,
    Jail,
    RunOptions,
    Sandbox,
    SupportsKeeping,
    allowed_hosts,
    connected,
    open_sandbox,
)
from nano_shared.errors import NanoError, SandboxError, UsageError
from nano_shared.types import Limits

_TIMED_OUT, _OURS = 124, 125


def command(
    argv: Annotated[
        list[str] | None, Argument(metavar="ARGV", help="A program and its arguments, or FILE.py.")
    ] = None,
    line: Annotated[
        str | None, Option("-c", metavar="TEXT", help="Run a line of shell instead of ARGV.")
    ] = None,
    workspace: Annotated[Path | None, Option(help="Directory to copy into the sandbox.")] = None,
    timeout: Annotated[float, Option(max=WEEK_S, help="Seconds of wall time.")] = 30.0,
    memory: Annotated[int, Option(min=16, max=TERABYTE_MB, help="MB.")] = 1024,
    max_output: Annotated[
        int,
        Option(
            min=1024, max=FLOOD_BYTES,
            help="Bytes kept of each stream, head and tail. A program that writes 64 MB is ended.",
        ),
    ] = Limits().output_bytes,
    net: Annotated[
        str,
        Option(
            help="none, or allow=HOST,...: HTTP(S) to these hosts, through a proxy that keeps every call."
        ),
    ] = "none",
    kind: Annotated[Literal["ns", "bwrap", "podman", "none"], Option("--sandbox", help="Isolation.")] = "ns",
    image: Annotated[
        str | None, Option("--container-image", help="Container image of --sandbox podman.")
    ] = None,
    python: Annotated[
        str | None, Option(help="Interpreter inside the sandbox; ours unless given.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print the record of the run instead of its output.")
    ] = False,
    batch: Annotated[
        bool, Option("--batch", help="Read one JSON request a line, answer one JSON line each.")
    ] = False,
    concurrency: Annotated[int, Option(min=1, max=256, help="Of --batch.")] = 2,
) -> int:  # fmt: skip
    """Run ARGV, FILE.py or a line of shell in a sandbox, on a copy of a directory.

    Put -- before ARGV if it has options of its own. A program ended by signal N gives 128+N, one that ran
    out of time 124; 125 is a failure of ours.
    """
    argv = argv or []
    if workspace is not None and not workspace.is_dir():
        raise UsageError(f"no such directory: {workspace}")
    if sum((bool(argv), line is not None, batch)) != 1:
        raise UsageError("name one thing to run: -- ARGV, FILE.py, -c 'shell text', or --batch")
    if argv and argv[0].startswith("-"):
        raise UsageError(f"no such option: {argv[0]}; see nano-coder exec --help")
    if not timeout > 0:  # nan is neither
        raise UsageError(f"--timeout {timeout:g}: name a number of seconds above 0")
    limits = Limits(tool_seconds=timeout, memory_mb=memory, output_bytes=max_output)
    hosts = allowed_hosts(net)
    if batch:
        if hosts:
            raise UsageError("--batch has no network: leave out --net")
        return answer_all(
            sys.stdin.buffer, sys.stdout, open_sandbox(kind, python=python, image=image, project=workspace),
            workspace, limits, concurrency,
        )  # fmt: skip
    script = _script(argv, workspace)
    try:
        sandbox = open_sandbox(kind, python=python, image=image, project=workspace)
        with closing(connected(sandbox, hosts).open(workspace, limits)) as jail:
            program = ["/bin/sh", "-c", line] if line is not None else _program(argv, script, jail)
            with _standard_input() as given:
                result = jail.run(program, stdin=given)
            calls = jail.calls if isinstance(jail, NsJail) else []
    except SandboxError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return _OURS
    if as_json:
        print(json.dumps({**record(result, sandbox), "network": [asdict(call) for call in calls]}))
    else:
        sys.stdout.buffer.write(result.stdout)
        sys.stderr.buffer.write(result.stderr)
        _tell_cut(result, max_output)
        if result.oom:
            print(f"nano-coder: ended for more than {memory} MB of memory: --memory", file=sys.stderr)
    if result.timed_out:
        return _TIMED_OUT
    return 128 + result.signal if result.signal is not None else result.exit_code or 0


command.__dict__["context_settings"] = {"ignore_unknown_options": True}


@contextmanager
def _standard_input() -> Iterator[bytes | int]:
    """What the program reads: our own, through a pipe, so that nothing of ours waits for what never comes."""
    if sys.stdin is None or sys.stdin.isatty():
        yield b""
        return
    reading, writing = os.pipe()
    # ends with us, or when the program has closed its end
    threading.Thread(target=_copy, args=(sys.stdin.fileno(), writing), name="stdin", daemon=True).start()
    try:
        yield reading
    finally:
        os.close(reading)


def _copy(source: int, target: int) -> None:
    with suppress(OSError):
        while chunk := os.read(source, 1 << 16):
            while chunk:
                chunk = chunk[os.write(target, chunk) :]
    os.close(target)


def _tell_cut(result: ExecResult, most: int) -> None:
    for name, size, kept in (
        ("stdout", result.stdout_bytes, len(result.stdout)),
        ("stderr", result.stderr_bytes, len(result.stderr)),
    ):
        if size > kept:
            said = f"{name} had {size} bytes, of which the first and the last {most // 2} are here"
            print(f"nano-coder: {said}; --max-output keeps up to {FLOOD_BYTES}", file=sys.stderr)
    if result.stdout_bytes + result.stderr_bytes > FLOOD_BYTES:
        print(
            f"nano-coder: ended for more than {FLOOD_BYTES} bytes of output: write to a file", file=sys.stderr
        )


def _script(argv: Sequence[str], workspace: Path | None) -> bytes | None:
    """The text of FILE.py, where the first argument names one of the host that the workspace lacks."""
    if not argv or not argv[0].endswith(".py") or (workspace is not None and (workspace / argv[0]).exists()):
        return None
    try:
        return Path(argv[0]).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {argv[0]}: {error.strerror}") from None


def _program(argv: Sequence[str], script: bytes | None, jail: Jail) -> list[str]:
    if not argv[0].endswith(".py"):
        return list(argv)
    name = argv[0]
    if script is not None:
        name = Path(argv[0]).name
        jail.write(name, script)
    return ["python", name, *argv[1:]]


def record(result: ExecResult, sandbox: Sandbox) -> dict[str, object]:
    layers: Mapping[str, bool] = sandbox.layers
    return {
        **result.as_json(), "stdout_bytes": result.stdout_bytes, "stderr_bytes": result.stderr_bytes,
        "cpu_s": result.used.cpu_s, "peak_memory_bytes": result.used.peak_bytes, "sandbox": sandbox.name,
        "layers": dict(layers),
    }  # fmt: skip


MOST_OPEN = 64
"""each holds a jail"""


class Sessions:
    """Jails by name, whose files and processes stay. Thread-safe, with one user of a name at a time."""

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

    def serve(request: Request | dict[str, Any], before: Future[None] | None) -> None:
        try:
            if before is not None:  # of the same session, and begun earlier: it needs no worker that waits
                wait([before])
            said = (
                request if isinstance(request, dict)
                else _answer(request, sandbox, workspace, limits, sessions)
            )  # fmt: skip
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
        last: dict[str, Future[None]] = {}
        while line := lines.readline(_LONGEST_LINE):
            if not line.strip():
                continue
            slots.acquire()
            request = _read_request(line)
            name = request.session if isinstance(request, Request) else None
            futures.append(workers.submit(serve, request, last.get(name or "")))
            if name is not None:
                last[name] = futures[-1]
        for future in futures:
            future.result()
    return _BAD_INPUT if bad.is_set() else 0


def _read_request(line: bytes) -> Request | dict[str, Any]:
    """The request, or the answer to a line that is none."""
    try:
        return Request.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors()[0]
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    where = ".".join(str(part) for part in first["loc"]) or "request"
    said = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    return {"id": given.get("id") if isinstance(given, dict) else None, "error": said}


def _answer(
    request: Request, sandbox: Sandbox, workspace: Path | None, limits: Limits, sessions: Sessions
) -> dict[str, Any]:
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
