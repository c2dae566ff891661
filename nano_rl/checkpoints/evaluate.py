"""Evaluation: success on held-out tasks with 95 % intervals, by suite and level, and stored as evidence.

A stored evaluation is one JSON file in `evaluations/` of NANO_HOME: the outcome of a model on each task of a
file. It refers to a checkpoint by the hash of its manifest, so that it may be renamed or copied.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nano_coder import __version__ as runtime_version
from nano_coder.models.opening import SHIPPED
from nano_coder.run.execution import Runtime
from nano_shared.checkpoint import MANIFEST
from nano_shared.errors import CheckpointError
from nano_shared.files import (
    checkpoints_dir,
    content_hash,
    file_hash,
    nano_home,
    new_run_id,
    user_path,
    write_text,
)
from nano_shared.types import Split, Task, Trajectory, Value, outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRow:
    """The success rate on one part of the tasks. Runs that could not be graded are counted separately."""

    name: str
    successes: int
    graded: int
    ungraded: int
    low: float
    high: float
    """95 % interval of the success rate (`success_interval`)"""

    @property
    def rate(self) -> float:
        return self.successes / self.graded if self.graded else 0.0


def table(trajectories: Sequence[Trajectory]) -> list[SuccessRow]:
    """A row for all tasks, one per suite if there are several, and one per level and view."""
    suites: dict[str, list[Trajectory]] = defaultdict(list)
    parts: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        suites[suite_of(trajectory.task)].append(trajectory)
        task = trajectory.task
        part = f"level {task.level} {task.view}" if task.level is not None else "other"
        parts[part].append(trajectory)
    by_suite = [row_of(f"suite {name}", suites[name]) for name in sorted(suites)] if len(suites) > 1 else []
    return [row_of("all", trajectories), *by_suite, *(row_of(name, parts[name]) for name in sorted(parts))]


def suite_of(task: Task) -> str:
    """The suite and version that generated a task, or the source that it was imported from."""
    if task.provenance.source == "generated":
        return task.key.partition(":")[0]
    return task.provenance.source


def cluster_of(task: Task) -> str:
    """The cluster of a task, whose results are correlated: its program, or else the task alone."""
    return task.program_hash or task.key


def component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each reward component over the runs with a score of it, and of the reward."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.verdict is None:
            continue
        scored = {"reward": trajectory.verdict.reward, **trajectory.verdict.components}
        for name, value in scored.items():
            if value is not None:
                values[name].append(value)
    return {name: sum(of) / len(of) for name, of in values.items()}


def row_of(name: str, trajectories: Sequence[Trajectory]) -> SuccessRow:
    passed: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        value = outcome(trajectory.verdict)
        if value is not None:
            passed[cluster_of(trajectory.task), trajectory.task.key].append(value >= 1)
    graded, successes = sum(map(len, passed.values())), sum(map(sum, passed.values()))
    clusters = by_cluster((cluster, sum(runs) / len(runs)) for (cluster, _), runs in passed.items())
    # with a single program the interval is over its runs
    low, high = success_interval(clusters) if len(clusters) != 1 else wilson(successes, graded)
    ungraded = len(trajectories) - graded
    return SuccessRow(name=name, successes=successes, graded=graded, ungraded=ungraded, low=low, high=high)


def success_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the success rate; `clusters` hold the mean success of each task. Wilson's if each
    cluster is one task that passed or failed in all runs, or if all clusters agree, so that resampling has no
    spread; else clusters are resampled, since tasks of one program are not independent."""
    means = [sum(tasks) / len(tasks) for tasks in clusters]
    alone = all(len(tasks) == 1 for tasks in clusters)
    if all(mean in (0, 1) for mean in means) and (alone or len(set(means)) < 2):
        return wilson(sum(mean == 1 for mean in means), len(means))
    return bootstrap(clusters, seed=0)[1:]


class TaskOutcome(Value):
    id: str
    key: str
    cluster: str | None = None
    """`cluster_of` the task; None in evaluations of older versions"""
    suite: str
    level: int | None = None
    view: str | None = None
    split: Split | None = None
    runs: tuple[str, ...]
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
    model: str
    manifest_hash: str | None
    """`sha256:` of the checkpoint's manifest; None for other models"""
    log: str
    conditions: Conditions
    success: SuccessInterval
    """share of runs that passed, with its 95 % interval"""
    tasks: tuple[TaskOutcome, ...]


def make_evaluation(
    model: str, tasks: Sequence[Task], runs: Sequence[Trajectory], runtime: Runtime, conditions: Conditions
) -> Evaluation:
    of_task: dict[str, list[Trajectory]] = defaultdict(list)
    for run in runs:
        of_task[run.task.listed.id].append(run)
    whole = row_of("all", runs)
    return Evaluation(
        id=new_run_id(), created=time.time(), model=model, manifest_hash=manifest_hash(model),
        log=runtime.store.url, conditions=conditions,
        success=SuccessInterval(mean=whole.rate, low=whole.low, high=whole.high),
        tasks=tuple(task_outcome(task, of_task[task.id]) for task in tasks),
    )  # fmt: skip


def tasks_hash(tasks: Sequence[Task]) -> str:
    return content_hash(sorted({task.id for task in tasks}))


def evaluations_dir() -> Path:
    return nano_home() / "evaluations"


def store_evaluation(evaluation: Evaluation) -> None:
    """Write the evaluation atomically. Raises CheckpointError if the disk is full."""
    path = evaluations_dir() / f"{evaluation.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, evaluation.model_dump_json(indent=1) + "\n", CheckpointError)


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
    candidates = [SHIPPED] if model == "shipped" else [checkpoints_dir() / model, user_path(model)]
    return next((folder for folder in candidates if (folder / MANIFEST).is_file()), None)


def manifest_hash(model: str) -> str | None:
    folder = checkpoint_folder(model)
    return None if folder is None else file_hash(folder / MANIFEST)


def task_outcome(task: Task, runs: Sequence[Trajectory]) -> TaskOutcome:
    return TaskOutcome(
        id=task.id, key=task.key, cluster=cluster_of(task), suite=suite_of(task), level=task.level,
        view=task.view, split=task.split, runs=tuple(run.id for run in runs),
        seeds=tuple(run.seed for run in runs), outcomes=tuple(outcome(run.verdict) for run in runs),
    )  # fmt: skip


Z95 = 1.959963984540054
"""two-sided 95 % quantile of the normal distribution"""


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a success rate (Wilson 1927); (0, 1) for n = 0. Raises ValueError unless 0 <=
    successes <= n."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie between 0 and n={n}")
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, Z95**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # exact at 0 and n: rounding must not move the bound past the rate
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def bootstrap(
    clusters: Sequence[Sequence[float]], seed: int, *, resamples: int = 4000
) -> tuple[float, float, float]:
    """(mean of all values, low, high): the 95 % percentile interval (Efron and Tibshirani 1993, ch. 13) by
    resampling whole clusters; deterministic in `seed`. Raises ValueError if there are no values."""
    sized = [(math.fsum(values), len(values)) for values in clusters if values]
    if not sized:
        raise ValueError("there is nothing to resample")
    rng = random.Random(seed)
    means = sorted(_mean(rng.choices(sized, k=len(sized))) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[math.ceil(0.975 * resamples) - 1]
    return _mean(sized), low, high


def _mean(sized: Sequence[tuple[float, int]]) -> float:
    return math.fsum(total for total, _ in sized) / sum(n for _, n in sized)


def by_cluster(named: Iterable[tuple[str, float]]) -> list[list[float]]:
    """The values of each cluster, in the order of first appearance."""
    clusters: dict[str, list[float]] = {}
    for name, value in named:
        clusters.setdefault(name, []).append(value)
    return list(clusters.values())


_GRID = 50_000
"""steps that the largest sum of a sign-flip test is rounded to where the values have no small denominator"""


def sign_flip(clusters: Sequence[Sequence[float]]) -> float:
    """One-sided p-value of a mean above 0 by Fisher's randomisation test: the share of all signs of the
    cluster sums whose total reaches the observed one. Exact for rewards that are multiples of 1/k, k small; 1
    if all values are 0."""
    changed = [total for values in clusters if (total := math.fsum(values))]
    if not changed:
        return 1.0
    exact = [Fraction(total).limit_denominator(1000) for total in changed]
    size = math.lcm(*(total.denominator for total in exact))
    largest = math.fsum(map(abs, changed))
    scale = float(size) if size * largest <= _GRID else _GRID / largest
    steps = [round(total * scale) for total in changed]
    shares = {0: 1.0}
    for step in steps:
        after: dict[int, float] = defaultdict(float)
        for total, share in shares.items():
            after[total + step] += share / 2
            after[total - step] += share / 2
        shares = after
    return min(1.0, math.fsum(share for total, share in shares.items() if total >= sum(steps)))
