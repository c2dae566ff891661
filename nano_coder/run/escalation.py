"""Escalation: the run of a hosted model on a task whose check a local policy's run failed."""

from __future__ import annotations

import json

from nano_coder.agent.dialects.api import Api
from nano_coder.run.execution import Runtime, branch_run, can_reflect, grade_run, reflect_run
from nano_shared.types import ApiAnswer, ApiCall, Finish, Trajectory, Turn


def failed_check(run: Trajectory) -> bool:
    return run.reward is not None and run.reward < 1


def escalate_run(failed: Trajectory, runtime: Runtime, *, from_best: bool = False) -> Trajectory:
    """Run the task of a failed run anew under the hosted policy of `runtime`, graded, with it as its parent.

    `from_best` continues the failed run instead, as a second attempt that reads its diff and its check's
    output; a run that nothing can follow is begun anew all the same. The profile is that of an API which
    works in the place of the failed run's policy. Raises as `run_task` does.
    """
    if from_best and can_reflect(failed):
        return grade_run(reflect_run(_told_to_api(failed), runtime), runtime)
    return grade_run(branch_run(failed, (), runtime), runtime)


def _told_to_api(run: Trajectory) -> Trajectory:
    """The run as if an API had made its calls: a server reads the history as calls, not as text of another
    dialect. Tokens are left out, since no server takes them."""
    return run.model_copy(
        update={"turns": tuple(turn if turn.is_summary else _told(turn) for turn in run.turns)}
    )


def _told(turn: Turn) -> Turn:
    calls = tuple(
        ApiCall(id=f"call_{turn.index}_{number}", name=call.name, arguments=json.dumps(call.arguments))
        for number, call in enumerate(turn.calls)
    )
    said = turn.thought if calls else turn.completion.text
    changes = {"text": said, "finish": Finish.STOP, "tokens": None, "api": ApiAnswer(calls=calls)}
    return turn.model_copy(
        update={"completion": turn.completion.model_copy(update=changes), "parser": Api.name}
    )
