"""Tools of the run and its project, not of files: `plan`, `delegate`, `submit`, `remember` and `recall`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.agent_notes import Notes
from nano_shared.errors import UsageError
from nano_shared.printable import printable

MOST_STEPS, LONGEST_STEP = 40, 300


class PlanStep(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step: str
    status: Literal["pending", "in_progress", "completed"] = "pending"


@tool()
def plan(context: ToolContext, steps: list[PlanStep]) -> ToolResult:
    """Show the user your plan: all its steps in order, each pending, in_progress or completed, at most one
    in_progress. Call it when the work takes several steps, and again whenever one is done."""
    if not 1 <= len(steps) <= MOST_STEPS:
        raise ToolFailure(f"a plan has 1 to {MOST_STEPS} steps")
    for number, one in enumerate(steps, 1):
        if not one.step.strip() or len(one.step) > LONGEST_STEP:
            raise ToolFailure(f"step {number}: it is empty, or longer than {LONGEST_STEP} characters")
    current = [one.step for one in steps if one.status == "in_progress"]
    if len(current) > 1:
        raise ToolFailure(f"at most one step is in_progress, not {len(current)}")
    done = sum(one.status == "completed" for one in steps)
    now = f"; now: {current[0]}" if current else ""
    return ToolResult(text=f"{done} of {len(steps)} steps completed{now}")


MOST_TURNS = 100
DELEGATE = "delegate"
"""the tool that starts a sub-agent"""


@tool()
def delegate(context: ToolContext, prompt: str, max_turns: int = 20) -> str:
    """Hand a part of the work to a sub-agent with your tools and files and a context of its own. It knows
    nothing but the prompt, and you get nothing but its final answer. Must be the last call of a message."""
    if not prompt.strip():
        raise ToolFailure("the prompt is empty: say what the sub-agent shall do, and what it has to know")
    if not 1 <= max_turns <= MOST_TURNS:
        raise ToolFailure(f"max_turns is 1 to {MOST_TURNS}")
    return ""  # the loop lets the sub-agent work, and its answer is the observation


@tool(body="answer")
def submit(context: ToolContext, answer: str | None = None) -> ToolResult:
    """Finish. Give the answer if the task asks for one."""
    return ToolResult(text="submitted", finished=True, answer=answer)


_MOST_SHOWN = 4000
"""characters of the notes that one call shows"""


@tool(body="note")
def remember(context: ToolContext, note: str) -> ToolResult:
    """Keep a note about this project for later runs: a fact, a decision, a command that works. No secrets."""
    try:
        kept, secrets = _notes(context).remember(note, run_id=context.run_id, turn=context.turn)
    except UsageError as problem:
        raise ToolFailure(str(problem)) from None
    left_out = f"; {secrets} secret{'s' if secrets > 1 else ''} left out of it" if secrets else ""
    return ToolResult(text=f"kept as note {kept.id}{left_out}")


@tool(recorded=True)
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
