"""The tool `plan`: the steps of the work and how far it has come, for the user to see."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

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
