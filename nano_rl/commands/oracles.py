"""Oracle runs: executed once, then read back from the log."""

from __future__ import annotations

from collections.abc import Sequence

from nano_coder.runtime import COMPACT_1, Runtime, ScriptedPolicy, open_sandbox, serving_profile
from nano_rl.commands.progress import bar
from nano_rl.oracle import ORACLE, oracle_policy
from nano_rl.rollout import execute
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Task, Trajectory


def oracle_runtime(log: str | None) -> Runtime:
    return Runtime(
        policy=ScriptedPolicy([]),
        sandbox=open_sandbox(),
        store=LogStore.open(log),
        profile=COMPACT_1,
        policy_name=ORACLE,
    )


def oracle_runs(tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
    """One successful oracle run a task, in task order: those in the log, and fresh ones for the rest.

    Raises UsageError for a task whose oracle does not earn 1: it would teach a mistake.
    """
    wanted = {task.id for task in tasks}
    found = {
        t.task.id: t
        for t in runtime.store.trajectories(policy=ORACLE)
        if t.task.id in wanted
        and t.reward == 1
        and t.profile_hash == serving_profile(runtime.profile, t.task).hash
    }
    missing = [task for task in tasks if task.id not in found]
    if missing:
        policies = [oracle_policy(task, runtime.profile) for task in missing]
        with bar("oracle runs", len(missing)) as progress:
            fresh = execute(missing, policies, runtime, on_run=lambda t: progress.advance())
        found |= {t.task.id: t for t in fresh}
    for task in tasks:
        if found[task.id].reward != 1:
            run = found[task.id]
            raise UsageError(
                f"the oracle of task {task.key!r} does not solve it (run {run.id}); leave it out"
            )
    return [found[task.id] for task in tasks]
