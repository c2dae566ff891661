"""Evaluation: success on held-out tasks with 95 % intervals, by suite and level, paired with a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.checkpoints.statistics import bootstrap, by_cluster, paired_bootstrap, wilson
from nano_rl.rewards import outcome
from nano_shared.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Success on one part of the tasks. Runs without a reward (failures of ours) are counted apart."""

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


def table(trajectories: Sequence[Trajectory]) -> list[Row]:
    """A row for all tasks, one a suite where there are several, then one a level and view."""
    suites: dict[str, list[Trajectory]] = defaultdict(list)
    parts: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        suites[suite_of(trajectory.task)].append(trajectory)
        parts[_part(trajectory.task)].append(trajectory)
    by_suite = [row_of(f"suite {name}", suites[name]) for name in sorted(suites)] if len(suites) > 1 else []
    return [row_of("all", trajectories), *by_suite, *(row_of(name, parts[name]) for name in sorted(parts))]


def suite_of(task: Task) -> str:
    """What a task came from: the suite and version that generated it, or the source it was imported from."""
    if task.provenance.source == "generated":
        return task.key.partition(":")[0]
    return task.provenance.source


def cluster_of(task: Task) -> str:
    """What a task rises and falls with: its program, which others may ask for too; else itself alone."""
    return task.program_hash or task.key


def paired(
    new: Sequence[Trajectory], old: Sequence[Trajectory], *, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference in success on the tasks that both were graded on, with a 95 % bootstrap interval over
    programs.

    A task that was run several times counts once, with the mean of its runs: those are not independent.
    """
    after, before = _task_means(new), _task_means(old)
    both = [key for key in after if key in before]
    cluster = {run.task.key: cluster_of(run.task) for run in new}
    return paired_bootstrap(
        [after[key] for key in both], [before[key] for key in both], seed,
        clusters=[cluster[key] for key in both],
    )  # fmt: skip


def component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each component over the runs in which it was scored, and of the composed reward."""
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


def row_of(name: str, trajectories: Sequence[Trajectory]) -> Row:
    passed: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        value = outcome(trajectory.verdict)
        if value is not None:
            passed[cluster_of(trajectory.task), trajectory.task.key].append(value >= 1)
    graded, successes = sum(map(len, passed.values())), sum(map(sum, passed.values()))
    clusters = by_cluster((cluster, sum(runs) / len(runs)) for (cluster, _), runs in passed.items())
    # of a single program nothing is told but by its runs
    low, high = success_interval(clusters) if len(clusters) != 1 else wilson(successes, graded)
    return Row(
        name=name,
        successes=successes,
        graded=graded,
        ungraded=len(trajectories) - graded,
        low=low,
        high=high,
    )


def success_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the success rate of tasks, each with the mean of its graded runs, by cluster.

    Wilson's where each task is a cluster of its own that passed or failed. Runs of one task and tasks of one
    program are not independent, so otherwise the clusters are resampled; where they all agree resampling
    sees no spread, and Wilson's interval of as many tasks stands in.
    """
    means = [sum(tasks) / len(tasks) for tasks in clusters]
    alone = all(len(tasks) == 1 for tasks in clusters)
    if all(mean in (0, 1) for mean in means) and (alone or len(set(means)) < 2):
        return wilson(sum(mean == 1 for mean in means), len(means))
    return bootstrap(clusters, seed=0)[1:]
