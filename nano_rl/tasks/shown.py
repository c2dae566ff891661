"""What of the hidden part a policy could read, in the prompt or in the workspace."""

from __future__ import annotations

import re

from nano_shared.types import Case, Task

LONG_ENOUGH = 24
"""characters of a line of a hidden file that are too many for a coincidence"""


def leaks(task: Task) -> list[str]:
    """What is shown that should not be, one sentence each."""
    hidden = task.hidden
    if hidden is None:
        return []
    texts = (task.prompt, task.check or "", *task.files.values())
    found = []
    calls = [c for c in hidden.cases if c.args or c.kwargs]
    if hidden.kind == "cases" and calls:
        squeezed = [_squeezed(text) for text in texts]
        shown = [c for c in calls if any(_squeezed(call_of(task, c)) in text for text in squeezed)]
        if shown:
            found.append(
                f"{len(shown)} of {len(calls)} hidden cases are shown, {call_of(task, shown[0])} first"
            )
    secret = {
        "test file": list(hidden.suite.files.values()) if hidden.suite else [],
        "mutant": list(hidden.mutants.values()),
    }
    for what, sources in secret.items():
        if what == "mutant" and any(source in texts for source in sources):
            found.append("a mutant lies in the workspace as a whole")
        if what == "test file" and (line := _line_in(sources, texts)):
            found.append(f"a line of a hidden test file is shown: {line[:80]}")
    return found


def call_of(task: Task, case: Case) -> str:
    """A case as the call it makes."""
    parts = [*map(repr, case.args), *(f"{k}={v!r}" for k, v in case.kwargs.items())]
    return f"{task.hidden.entry_point if task.hidden else ''}({', '.join(parts)})"


def _squeezed(text: str) -> str:
    """Without blanks, and with one kind of quotes."""
    return re.sub(r"\s+", "", text).replace('"', "'")


def _line_in(sources: list[str], texts: tuple[str, ...]) -> str | None:
    shown = {line.strip() for text in texts for line in text.split("\n")}
    for line in (line.strip() for source in sources for line in source.split("\n")):
        telling = len(line) >= LONG_ENOUGH and not line.startswith(
            ("import ", "from ", "#", "def ", "class ")
        )
        if telling and line in shown:
            return line
    return None
