"""One run of a task through the real runtime, with a script for a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, run_task
from nano_coder.run.execution import grade_run as graded
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.gather.rollouts import oracle_policy
from nano_shared.store import LogStore
from nano_shared.types import OracleAction, Split, Task, Trajectory
from nano_suites.drawing import make_tasks


def runtime(folder: Path) -> Runtime:
    return Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=LogStore.open(folder / "log.db"))


def run(task: Task, actions: Sequence[OracleAction], within: Runtime) -> Trajectory:
    """The actions in the task's dialect, executed and graded."""
    if not actions:
        raise ValueError("a run needs an action")
    policy = oracle_policy(task.model_copy(update={"oracle": tuple(actions)}), within.profile)
    return graded(run_task(task, Runtime(policy=policy, sandbox=within.sandbox, store=within.store)), within)


def sample(suite: str, per_level: int, split: Split = Split.TRAIN, seed: int = 5) -> list[Task]:
    return make_tasks(suite=suite, levels=range(4), n=4 * per_level, seed=seed, split=split)
