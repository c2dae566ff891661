"""`nano-coder exec`: one command in the sandbox with the program's own exit code, or many as a batch."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.namespaces import NsJail
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox, allowed_hosts, connected
from nano_coder.sandbox.request import FLOOD_BYTES, TERABYTE_MB, WEEK_S
from nano_shared.errors import SandboxError, UsageError
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
    image: Annotated[str | None, Option(help="Container image of --sandbox podman.")] = None,
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
        from nano_coder.commands.batch import answer_all

        if hosts:
            raise UsageError("--batch has no network: leave out --net")
        return answer_all(
            sys.stdin.buffer,
            sys.stdout,
            open_sandbox(kind, python=python, image=image, project=workspace),
            workspace,
            limits,
            concurrency,
        )
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
    """Everything that is known of a run."""
    layers: Mapping[str, bool] = sandbox.layers
    return {
        **result.as_json(),
        "stdout_bytes": result.stdout_bytes,
        "stderr_bytes": result.stderr_bytes,
        "cpu_s": result.cpu_s,
        "peak_memory_bytes": result.peak_bytes,
        "sandbox": sandbox.name,
        "layers": dict(layers),
    }
