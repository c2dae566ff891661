"""Oracle policies: a task's own solution, written in the profile's dialect and run for real."""

from __future__ import annotations

from collections.abc import Sequence

from nano_coder.runtime import DIALECTS, Runtime, ScriptedPolicy, offered_tools, serving_profile
from nano_rl.rollout import OnRun, execute
from nano_shared.errors import UsageError
from nano_shared.profile import InterfaceProfile
from nano_shared.types import StopReason, Task, Trajectory

ORACLE = "oracle"


def oracle_policy(task: Task, profile: InterfaceProfile) -> ScriptedPolicy:
    """A policy that writes the task's oracle, one action a turn. Raises UsageError if it has none."""
    if not task.oracle:
        raise UsageError(f"task {task.key!r} has no oracle, so it cannot serve a warm start")
    profile = serving_profile(profile, task)
    dialect, tools = DIALECTS[profile.dialect], offered_tools(profile, task)
    return ScriptedPolicy(
        [dialect.render(action.thought, (action,), tools) for action in task.oracle], id=ORACLE
    )


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
