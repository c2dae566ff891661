"""The tools `shell`, `python` and `sql`: run a command line, a program or statements in the workspace."""

from __future__ import annotations

import re
from dataclasses import replace

from nano_coder.sandbox.protocol import ExecResult
from nano_coder.tools.tool import ToolContext, ToolResult, tool
from nano_shared.process import parse


@tool(body="command", mutates=True)
def shell(context: ToolContext, command: str) -> ToolResult:
    """Run a shell command in the workspace and show its output."""
    return execution_result(context.run(["/bin/sh", "-c", command]))


def execution_result(execution: ExecResult) -> ToolResult:
    """The result of a command: stdout, stderr, and how it ended if not with exit code 0."""
    parts = [_text(execution.stdout), _text(execution.stderr)]
    if execution.timed_out:
        parts.append("[timed out]")
    elif execution.oom:
        parts.append("[out of memory]")
    elif execution.signal is not None:
        parts.append(f"[killed by signal {execution.signal}]")
    elif execution.exit_code:
        parts.append(f"[exit code {execution.exit_code}]")
    text = "\n".join(part.rstrip("\n") for part in parts if part)
    return ToolResult(text=text or "[no output]", ok=execution.ok, execution=execution)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


@tool(body="code", mutates=True)
def python(context: ToolContext, code: str) -> ToolResult:
    """Run a Python program in the workspace and show its output."""
    result = execution_result(context.run_python(code))
    if result.ok or not _is_command_line(code):
        return result
    note = "[this is a command line, not a Python program; shell runs it]"
    return replace(result, text=f"{result.text}\n{note}")


def _is_command_line(code: str) -> bool:
    """Whether a text is one line that is no Python and begins with a program and its argument."""
    if not re.fullmatch(r"\s*[\w./-]+ +\S.*\s*", code):
        return False
    try:
        parse(code)
    except (SyntaxError, ValueError):
        return True
    return False


# a task's files are text, so a database arrives as the SQL that creates it
_PROGRAM = """
import os, sqlite3, sys

MOST_ROWS = 200
path, text = sys.argv[1:]
dump = os.path.splitext(path)[0] + ".sql"


def statements(text):
    part = ""
    for piece in text.split(";"):
        part += piece + ";"
        if part.strip(" \\n\\t;") and sqlite3.complete_statement(part):
            yield part
            part = ""
    if part.strip(" \\n\\t;"):
        yield part


def show(cursor):
    if cursor.description is None:
        print(f"{max(cursor.rowcount, 0)} rows changed")
        return
    print("|".join(column[0] for column in cursor.description))
    rows = cursor.fetchmany(MOST_ROWS + 1)
    for row in rows[:MOST_ROWS]:
        print("|".join("NULL" if value is None else str(value) for value in row))
    if len(rows) > MOST_ROWS:
        print(f"[only the first {MOST_ROWS} rows are shown]")


def build():
    with open(dump, encoding="utf-8") as file:
        script = file.read()
    fresh = path + ".new"
    with sqlite3.connect(fresh) as made:
        made.executescript(script)
    made.close()
    os.rename(fresh, path)


try:
    if not os.path.exists(path):
        if not os.path.exists(dump):
            sys.exit(f"error: no such database: {path}")
        build()
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements(text):
        show(connection.execute(statement))
except (sqlite3.Error, sqlite3.Warning, OSError, ValueError) as problem:
    sys.exit(f"error: {problem}")
"""


@tool(body="statement", mutates=True)
def sql(context: ToolContext, database: str, statement: str) -> ToolResult:
    """Run SQL on a SQLite database. One that is there only as NAME.sql is built from it first."""
    return execution_result(context.run_python(_PROGRAM, [database, statement], isolated=True))
