"""A further message of the user to a run that has ended: a run of its own that continues it.

Its first turns are the parent's with their tokens; the last of them gets one more observation, the message.
The workspace goes on as the parent left it; of a shell the directory of files, and no process or variable.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nano_coder.agent.loop import SAID
from nano_coder.agent.sub_agent import observed_last
from nano_coder.run.execution import OnTurn, Runtime, branch_run, refuse_served
from nano_coder.run.reflection import as_much_again
from nano_shared.errors import UsageError
from nano_shared.types import Observation, StopReason, Trajectory


def say_to_run(
    run: Trajectory,
    text: str,
    runtime: Runtime,
    *,
    seed: int | None = None,
    on_turn: OnTurn | None = None,
    on_start: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """Continue a run with a message of the user. What the run has used of its limits is added to them.

    Raises UsageError for a run that nothing can follow, and as `branch_run` does.
    """
    refuse_unsaid(run, text)
    now = time.time()
    said = Observation(tool=SAID, ok=True, text=text, bytes_total=len(text.encode()), started=now, ended=now)
    turns = observed_last(run.turns, said)
    task = run.task.model_copy(update={"limits": as_much_again(run, runtime.policy.count)})
    return branch_run(run, turns, runtime, task=task, seed=seed, on_turn=on_turn, on_start=on_start)


def refuse_unsaid(run: Trajectory, text: str) -> None:
    """Raises UsageError for a run that no message can follow."""
    refuse_served(run)
    if not text.strip():
        raise UsageError("the message is empty; say what to do next")
    if run.stop is None:
        raise UsageError(f"run {run.id} has not ended; nano-coder resume {run.id} goes on with it")
    if not run.turns:
        raise UsageError(f"run {run.id} has no turn to go on from; run the task again")
    if run.is_redacted:
        raise UsageError(f"run {run.id} was redacted: what the model read is not in the log any more")
    if run.stop is StopReason.CONTEXT_FULL:
        raise UsageError(
            f"the context of run {run.id} is full; nano-coder apply {run.id} keeps its work, and a new run"
            " goes on from there"
        )
