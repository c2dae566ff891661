"""`nano-coder exec`: one command in the sandbox, with the program's own exit code."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import click

from nano_coder.sandbox import open_sandbox
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

_TIMED_OUT, _OURS = 124, 125


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--workspace", type=click.Path(path_type=Path), help="Directory to copy into the sandbox.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True)
@click.option("--memory", type=click.IntRange(16), default=1024, show_default=True, help="MB.")
def command(argv: tuple[str, ...], workspace: Path | None, timeout: float, memory: int) -> int:
    """Run ARGV in a sandbox on a copy of a directory. Put -- before it if it has options of its own."""
    if workspace is not None and not workspace.is_dir():
        raise UsageError(f"no such directory: {workspace}")
    given = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        with closing(open_sandbox().open(workspace, Limits(tool_seconds=timeout, memory_mb=memory))) as jail:
            result = jail.run(argv, stdin=given)
    except SandboxError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return _OURS
    sys.stdout.buffer.write(result.stdout)
    sys.stderr.buffer.write(result.stderr)
    if result.timed_out:
        return _TIMED_OUT
    return 128 + result.signal if result.signal is not None else result.exit_code or 0
