"""What a view fills in of a task, and the pieces that views share."""

from __future__ import annotations

from nano_rl.suites.functions.admitted_program import Study
from nano_shared.types import Case, HiddenChecks, Limits, OracleAction

BRIEF = Limits(max_turns=3, max_tokens=96)
SHORT = Limits(max_turns=4, max_tokens=256)
USUAL = Limits(max_turns=8, max_tokens=768)
LONG = Limits(max_turns=16, max_tokens=2048)
CHECK = "python -m pytest -q"
FILE_TOOLS = ("read_file", "edit_file", "submit")
REPAIR_TOOLS = ("read_file", "edit_file", "shell", "submit")
WRITE_TOOLS = ("read_file", "edit_file", "write_file", "shell", "submit")
SEARCH_TOOLS = ("search", "read_file", "edit_file", "shell", "submit")
_MODULES = """
stats tools numbers_lib lists shapes report ledger score parsing textkit sequence basics counts series names
labels filters totals measure pipeline records metrics words digits math_ops catalog summary
"""
MODULES = tuple(_MODULES.split())


def call(name: str, **arguments: str | int) -> OracleAction:
    return OracleAction(name=name, arguments=dict(arguments))


def correct(path: str, line: int, wrong: str, right: str, *, thought: str = "") -> OracleAction:
    """Replace a line, once it has been quoted as read_file shows it: a small model finds it by copying."""
    quoted = f"{thought}Wrong:\n{line}|{wrong}"
    return OracleAction(
        name="edit_file", arguments={"path": path, "line": line, "new": right}, thought=quoted
    )


def call_text(name: str, case: Case) -> str:
    return f"{name}({', '.join(repr(a) for a in case.args)})"


def claim(name: str, case: Case) -> str:
    """What a case says, as an expression that is true."""
    return f"{call_text(name, case)} {'is' if isinstance(case.expected, bool) else '=='} {case.expected!r}"


def numbered(text: str) -> str:
    """The text as read_file shows it."""
    return "\n".join(f"{n}|{line}" for n, line in enumerate(text.rstrip("\n").split("\n"), start=1))


def check_of(module: str) -> str:
    """The shell line that runs a module's plain assertions."""
    return f"python test_{module}.py"


def cases_of(study: Study) -> HiddenChecks:
    return HiddenChecks(kind="cases", entry_point=study.program.name, cases=study.hidden)
