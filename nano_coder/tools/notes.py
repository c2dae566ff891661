"""The tools `remember` and `recall`: notes of a project that outlive the run."""

from __future__ import annotations

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.errors import UsageError
from nano_shared.notes import Notes
from nano_shared.printable import printable

_MOST_SHOWN = 4000
"""characters of the notes that one call shows"""


@tool(body="note", recorded="replays")
def remember(context: ToolContext, note: str) -> ToolResult:
    """Keep a note about this project for later runs: a fact, a decision, a command that works. No secrets."""
    try:
        kept, secrets = _notes(context).remember(note, run_id=context.run_id, turn=context.turn)
    except UsageError as problem:
        raise ToolFailure(str(problem)) from None
    left_out = f"; {secrets} secret{'s' if secrets > 1 else ''} left out of it" if secrets else ""
    return ToolResult(text=f"kept as note {kept.id}{left_out}")


@tool(recorded="forks")
def recall(context: ToolContext, query: str) -> ToolResult:
    """Show the notes about this project that hold words of the query, best first; the newest for no words."""
    found = _notes(context).recall(query, run_id=context.run_id)
    shown = ""
    for note in found:
        line = f"[{note.id}] {printable(note.text)}\n"
        if len(shown) + len(line) > _MOST_SHOWN:
            shown += "[more notes; ask with other words]\n"
            break
        shown += line
    return ToolResult(text=shown or "no notes hold any of these words")


def _notes(context: ToolContext) -> Notes:
    if context.notes is None:
        raise ToolFailure("this run belongs to no project, so nothing is remembered")
    return context.notes
