"""Evaluations that are kept: what a model did on each task of a file, as evidence for a promotion.

One JSON file each, in `evaluations/` of NANO_HOME beside the checkpoints, which never change themselves. What
was measured is found by the hash of the checkpoint's manifest, so a checkpoint may be renamed or copied.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nano_coder import __version__ as runtime_version
from nano_coder.models.opening import SHIPPED
from nano_coder.run.execution import Runtime
from nano_rl.checkpoints.evaluate import cluster_of, row_of, suite_of
from nano_rl.rewards import outcome
from nano_shared.checkpoint import MANIFEST, checkpoints_dir
from nano_shared.durable import file_hash, write_text
from nano_shared.errors import CheckpointError
from nano_shared.hashing import content_hash
from nano_shared.run_id import new_run_id
from nano_shared.scratch import nano_home
from nano_shared.types import Split, Task, Trajectory, Value


class TaskOutcome(Value):
    """What the runs of one task came to."""

    id: str
    key: str
    cluster: str | None = None
    """what it rises and falls with (`cluster_of`); None in evaluations of before that was kept"""
    suite: str
    level: int | None = None
    view: str | None = None
    split: Split | None = None
    runs: tuple[str, ...]
    """ids in the log"""
    seeds: tuple[int | None, ...]
    outcomes: tuple[float | None, ...]
    """of each run; None where nothing was graded, by a failure of ours"""

    @property
    def mean(self) -> float | None:
        graded = [value for value in self.outcomes if value is not None]
        return sum(graded) / len(graded) if graded else None


class Conditions(Value):
    """How a model was run. Two evaluations compare only where these are the same."""

    tasks_hash: str
    """content hash of the task ids, sorted"""
    seed: int
    repeat: int
    temperature: float
    max_tokens: int
    dtype: str
    reward: str | None = None
    code_version: str = runtime_version


class Interval(Value):
    mean: float
    low: float
    high: float


class Evaluation(Value):
    version: Literal[1] = 1
    id: str
    created: float
    """unix seconds"""
    model: str
    """as the user named it"""
    manifest_hash: str | None
    """`sha256:` of the checkpoint's manifest; None for what is no checkpoint"""
    log: str
    """where the runs are"""
    conditions: Conditions
    success: Interval
    """share of runs that passed, with its 95 % interval"""
    tasks: tuple[TaskOutcome, ...]


def make_evaluation(
    model: str, tasks: Sequence[Task], runs: Sequence[Trajectory], runtime: Runtime, conditions: Conditions
) -> Evaluation:
    """The evaluation that `runs`, of those tasks under those conditions, are."""
    of_task: dict[str, list[Trajectory]] = defaultdict(list)
    for run in runs:
        of_task[run.task.id].append(run)
    whole = row_of("all", runs)
    return Evaluation(
        id=new_run_id(),
        created=time.time(),
        model=model,
        manifest_hash=manifest_hash(model),
        log=runtime.store.url,
        conditions=conditions,
        success=Interval(mean=whole.rate, low=whole.low, high=whole.high),
        tasks=tuple(_task_outcome(task, of_task[task.id]) for task in tasks),
    )


def tasks_hash(tasks: Sequence[Task]) -> str:
    return content_hash(sorted({task.id for task in tasks}))


def evaluations_dir() -> Path:
    return nano_home() / "evaluations"


def store_evaluation(evaluation: Evaluation) -> Path:
    """Write it, whole or not at all. Raises CheckpointError where the disk is full."""
    folder = evaluations_dir()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{evaluation.id}.json"
    write_text(path, evaluation.model_dump_json(indent=1) + "\n", CheckpointError)
    return path


def stored_evaluations(hash_of_manifest: str | None = None) -> Iterator[Evaluation]:
    """All that are kept, or those of one checkpoint, the newest first. Raises CheckpointError."""
    for path in sorted(evaluations_dir().glob("[!.]*.json"), reverse=True):
        try:
            found = Evaluation.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(
                f"evaluation {path} is damaged or of another nano ({first['msg']}); move it away, and"
                " evaluate again"
            ) from None
        if hash_of_manifest is None or found.manifest_hash == hash_of_manifest:
            yield found


def checkpoint_folder(model: str) -> Path | None:
    """The folder of a model that is a checkpoint of ours; None for any other model."""
    candidates = [SHIPPED] if model == "shipped" else [checkpoints_dir() / model, Path(model).expanduser()]
    return next((folder for folder in candidates if (folder / MANIFEST).is_file()), None)


def manifest_hash(model: str) -> str | None:
    folder = checkpoint_folder(model)
    return None if folder is None else file_hash(folder / MANIFEST)


def _task_outcome(task: Task, runs: Sequence[Trajectory]) -> TaskOutcome:
    return TaskOutcome(
        id=task.id,
        key=task.key,
        cluster=cluster_of(task),
        suite=suite_of(task),
        level=task.level,
        view=task.view,
        split=task.split,
        runs=tuple(run.id for run in runs),
        seeds=tuple(run.seed for run in runs),
        outcomes=tuple(outcome(run.verdict) for run in runs),
    )
