"""Attempts at a task that others come before in its project: all are run, and share a store of notes.

An earlier run earns its own reward times that of the last one, so that what it remembered counts by its use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_rl.tasks.pytest_plugins import runtime_for
from nano_shared.notes import attempt_notes
from nano_shared.policy import Policy
from nano_shared.redact.redactor import Redactor
from nano_shared.types import Task, Trajectory


def run_in_project(
    task: Task,
    runtime: Runtime,
    *,
    seed: int | None = None,
    policy_of: Callable[[Task], Policy] | None = None,
) -> list[Trajectory]:
    """The graded and logged runs of the earlier tasks and of the task, in this order.

    Their notes are those of this attempt alone. `policy_of` gives the policy of each task in place of the
    runtime's. Raises as `run_task` does.
    """
    with attempt_notes(Redactor().scrub) as notes:
        runs = []
        for one in (*task.earlier, task):
            policy = policy_of(one) if policy_of else runtime.policy
            within = replace(runtime_for(one, runtime), notes=notes, policy=policy)
            runs.append(grade_run(run_task(one, within, seed=seed), within))
    return [*(_by_its_use(run, runs[-1], runtime) for run in runs[:-1]), runs[-1]]


def _by_its_use(run: Trajectory, last: Trajectory, runtime: Runtime) -> Trajectory:
    verdict = run.verdict
    if verdict is None:
        return run
    both = None if verdict.reward is None or last.reward is None else verdict.reward * last.reward
    components = {**verdict.components, "later": last.reward}
    verdict = verdict.model_copy(update={"reward": both, "components": components})
    runtime.store.add_verdict(run.id, verdict)
    return run.model_copy(update={"verdict": verdict})


def number_of_runs(tasks: Iterable[Task]) -> int:
    """Of one attempt at each of the tasks."""
    return sum(1 + len(task.earlier) for task in tasks)
