"""Oracle runs: the tasks' own solutions executed once, then read back from the log."""

from __future__ import annotations

from collections.abc import Sequence

from nano_coder.agent.profiles import serving_profile
from nano_coder.run.execution import Runtime
from nano_rl.gather.rollouts import OnRun, execute
from nano_rl.tasks.oracle import ORACLE, oracle_policy
from nano_shared.errors import UsageError
from nano_shared.types import StopReason, Task, Trajectory


def oracle_runs(tasks: Sequence[Task], runtime: Runtime, on_run: OnRun | None = None) -> list[Trajectory]:
    """One successful oracle run a task, in task order: those in the log, and fresh ones for the rest.

    Raises UsageError for a task whose oracle does not earn 1: it would teach a mistake.
    """
    found = {run.task.id: run for run in logged_oracles(tasks, runtime)}
    missing = [task for task in tasks if task.id not in found]
    if missing:
        policies = [oracle_policy(task, runtime.profile) for task in missing]
        found |= {run.task.id: run for run in execute(missing, policies, runtime, on_run=on_run)}
    for task in tasks:
        if found[task.id].reward != 1:
            raise UsageError(_unsolved(found[task.id]))
    return [found[task.id] for task in tasks]


def _unsolved(run: Trajectory) -> str:
    why, way_out = "does not solve it", "leave it out"
    if run.stop is not None and run.stop.budget:
        why, way_out = f"was ended by {run.stop}", "raise the task's limit or leave it out"
    if run.stop is StopReason.MAX_TOKENS:
        why += ", where a byte of text counts as a token"
    return f"the oracle of task {run.task.key!r} {why} (run {run.id}); {way_out}"


def logged_oracles(tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
    """The successful oracle runs of these tasks that lie in the log already."""
    wanted = {task.id for task in tasks}
    return [
        run
        for run in runtime.store.trajectories(policy=ORACLE)
        if run.task.id in wanted
        and run.reward == 1
        and run.profile_hash == serving_profile(runtime.profile, run.task).hash
    ]
