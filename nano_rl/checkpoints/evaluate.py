"""Evaluation: success on held-out tasks with 95 % intervals, by suite and level, paired with a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.checkpoints.statistics import bootstrap, by_cluster, paired_bootstrap, wilson
from nano_rl.rewards import outcome
from nano_shared.types import Task, Trajectory


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
        parts[_part(trajectory.task)].append(trajectory)
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


def paired(
    new: Sequence[Trajectory], old: Sequence[Trajectory], *, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference in success (new - old) on common graded tasks, with a 95 % bootstrap interval over
    programs.

    A task with several runs counts once, with the mean of its runs, which are not independent.
    """
    after, before = _task_means(new), _task_means(old)
    both = [key for key in after if key in before]
    cluster = {run.task.key: cluster_of(run.task) for run in new}
    return paired_bootstrap(
        [after[key] for key in both], [before[key] for key in both], seed,
        clusters=[cluster[key] for key in both],
    )  # fmt: skip


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


def _part(task: Task) -> str:
    return f"level {task.level} {task.view}" if task.level is not None else "other"


def _task_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Task key -> mean outcome of its graded runs."""
    outcomes: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        value = outcome(trajectory.verdict)
        if value is not None:
            outcomes[trajectory.task.key].append(value)
    return {key: sum(values) / len(values) for key, values in outcomes.items()}


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
    return SuccessRow(
        name=name,
        successes=successes,
        graded=graded,
        ungraded=len(trajectories) - graded,
        low=low,
        high=high,
    )


def success_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the success rate; `clusters` hold the mean success of each task.

    Wilson's interval if each cluster is one task that passed or failed in all runs. Otherwise clusters are
    resampled, since tasks of one program are not independent; if all clusters agree, resampling has no
    spread, and Wilson's interval over the clusters is used.
    """
    means = [sum(tasks) / len(tasks) for tasks in clusters]
    alone = all(len(tasks) == 1 for tasks in clusters)
    if all(mean in (0, 1) for mean in means) and (alone or len(set(means)) < 2):
        return wilson(sum(mean == 1 for mean in means), len(means))
    return bootstrap(clusters, seed=0)[1:]
