"""The steps of a run, as `log show` counts them, and the workspace that each one left."""

from __future__ import annotations

from nano_shared.errors import UsageError
from nano_shared.types import Trajectory


def workspace_after(trajectory: Trajectory, step: int | None) -> str:
    """Snapshot after a step: 1 is the first turn, 0 the start, None the last one logged.

    Raises UsageError for a step that the run has not, and for a run that never got a workspace.
    """
    run, count = trajectory.id, len(trajectory.turns)
    if trajectory.snapshot is None:
        raise UsageError(f"run {run} never got a workspace: there is nothing that it changed")
    if step is not None and not 0 <= step <= count:
        steps = f"steps 1 to {count}, and 0 for the start" if count else "no steps, only 0 for the start"
        raise UsageError(f"run {run} has no step {step}: it has {steps}")
    turns = trajectory.turns[:step]
    return next((turn.snapshot for turn in reversed(turns) if turn.snapshot), trajectory.snapshot)


def workspaces_since(trajectory: Trajectory, step: int) -> list[str]:
    """Snapshots that the turns after a step left, newest first, each once."""
    found = (turn.snapshot for turn in reversed(trajectory.turns[step:]) if turn.snapshot)
    return list(dict.fromkeys(found))
