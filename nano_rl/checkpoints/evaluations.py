"""Stored evaluations: the outcome of a model on each task of a file, as evidence for a promotion.

Each is one JSON file in `evaluations/` of NANO_HOME. They refer to a checkpoint by the hash of its manifest,
so that it may be renamed or copied.
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
from nano_shared.hashing import content_hash, new_run_id
from nano_shared.scratch import nano_home
from nano_shared.types import Split, Task, Trajectory, Value


class TaskOutcome(Value):
    """The outcomes of the runs of one task."""

    id: str
    key: str
    cluster: str | None = None
    """`cluster_of` the task; None in evaluations of older versions"""
    suite: str
    level: int | None = None
    view: str | None = None
    split: Split | None = None
    runs: tuple[str, ...]
    """ids in the log"""
    seeds: tuple[int | None, ...]
    outcomes: tuple[float | None, ...]
    """outcome of each run; None if it could not be graded"""

    @property
    def mean(self) -> float | None:
        graded = [value for value in self.outcomes if value is not None]
        return sum(graded) / len(graded) if graded else None


class Conditions(Value):
    """The settings of an evaluation. Evaluations are comparable only if these are equal."""

    tasks_hash: str
    """content hash of the task ids, sorted"""
    seed: int
    repeat: int
    temperature: float
    max_tokens: int
    dtype: str
    reward: str | None = None
    code_version: str = runtime_version


class SuccessInterval(Value):
    mean: float
    low: float
    high: float


class Evaluation(Value):
    version: Literal[1] = 1
    id: str
    created: float
    """unix seconds"""
    model: str
    """name given by the user"""
    manifest_hash: str | None
    """`sha256:` of the checkpoint's manifest; None for other models"""
    log: str
    """address of the log with the runs"""
    conditions: Conditions
    success: SuccessInterval
    """share of runs that passed, with its 95 % interval"""
    tasks: tuple[TaskOutcome, ...]


def make_evaluation(
    model: str, tasks: Sequence[Task], runs: Sequence[Trajectory], runtime: Runtime, conditions: Conditions
) -> Evaluation:
    """The evaluation of `model` from its runs of the tasks."""
    of_task: dict[str, list[Trajectory]] = defaultdict(list)
    for run in runs:
        of_task[run.task.listed.id].append(run)
    whole = row_of("all", runs)
    return Evaluation(
        id=new_run_id(),
        created=time.time(),
        model=model,
        manifest_hash=manifest_hash(model),
        log=runtime.store.url,
        conditions=conditions,
        success=SuccessInterval(mean=whole.rate, low=whole.low, high=whole.high),
        tasks=tuple(_task_outcome(task, of_task[task.id]) for task in tasks),
    )


def tasks_hash(tasks: Sequence[Task]) -> str:
    return content_hash(sorted({task.id for task in tasks}))


def evaluations_dir() -> Path:
    return nano_home() / "evaluations"


def store_evaluation(evaluation: Evaluation) -> Path:
    """Write the evaluation atomically. Raises CheckpointError if the disk is full."""
    folder = evaluations_dir()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{evaluation.id}.json"
    write_text(path, evaluation.model_dump_json(indent=1) + "\n", CheckpointError)
    return path


def stored_evaluations(hash_of_manifest: str | None = None) -> Iterator[Evaluation]:
    """All stored evaluations, or those of one checkpoint, newest first. Raises CheckpointError if damaged."""
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
    """The folder of a checkpoint of nano; None for any other model."""
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
