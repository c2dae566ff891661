"""The tool `locate`: the lines of the project that are likely to hold a bug, from a failing check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nano_coder.sandbox.protocol import ExecResult
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

_INSIDE = Path(__file__).parent / "inside"
_PROGRAM = (_INSIDE / "suspicious_lines.py").read_text(encoding="utf-8")
_TRACER = (_INSIDE / "line_tracer.py").read_text(encoding="utf-8")
LINES, FUNCTIONS, TESTS = 10, 5, 5
"""lines, functions and failing tests that are shown"""
SECONDS = 180.0
"""longest time of the traced check, which takes some two to five times as long as without"""


@tool(body="check", mutates=True)
def locate(context: ToolContext, check: str | None = None) -> ToolResult:
    """Run the check (or another test command) and list the functions and lines that are likely to hold the
    bug, from what failing and passing tests run. For tests in Python."""
    command = check or context.check
    if not command:
        raise ToolFailure(
            "there is no check: give the command that runs the tests, such as python -m pytest -q"
        )
    found, done = traced(context, command)
    return ToolResult(text=_text(command, found), execution=done)


def traced(context: ToolContext, command: str) -> tuple[dict[str, Any], ExecResult]:
    """What `inside/suspicious_lines.py` writes of a command. Raises ToolFailure where it writes nothing."""
    order = {"check": command, "seconds": SECONDS, "tracer": _TRACER, "most": LINES}
    done = context.run_python(
        _PROGRAM, isolated=True, stdin=json.dumps(order).encode(), timeout=SECONDS + 15
    )  # fmt: skip
    try:
        return json.loads(done.stdout), done
    except ValueError:
        raise ToolFailure(f"the check could not be traced: {done.last_words}") from None


def _text(command: str, found: dict[str, Any]) -> str:
    failed, lines = found["failed"], found["lines"]
    if found["exit"] == 0:
        return f"`{command}` passes: there is nothing to locate"
    output = found["output"].strip()[-2000:]
    if found["exit"] is None:
        said = f"`{command}` did not end within {SECONDS:g} s; this is what was seen until then"
    else:
        said = f"`{command}` fails (exit code {found['exit']})"
    if not lines:
        return f"{said}, and no line of the project's Python ran under a failing test. Its output:\n{output}"
    named = [name for name in failed if name]
    if named:
        more = f" and {len(named) - TESTS} more" if len(named) > TESTS else ""
        said += f": {len(named)} tests fail, {found['passed']} pass\nFailing: {' '.join(named[:TESTS])}{more}"
    functions = [
        f"{number}. {f['path']}:{f['first']}-{f['last']} {f['function']}"
        for number, f in enumerate(found["functions"][:FUNCTIONS], 1)
    ]
    shown = [f"{line['path']}:{line['line']}: {line['source'].strip()}" for line in lines]
    parts = [said, "Functions, the likeliest first:", *functions, "Lines, the likeliest first:", *shown]
    return "\n".join(parts if functions else [said, *parts[2:]])
