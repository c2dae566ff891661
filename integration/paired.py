"""Paired differences in success, with bootstrap intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nano_rl.checkpoints.evaluate import bootstrap, by_cluster, cluster_of
from nano_shared.types import Trajectory, outcome


def paired(
    new: Sequence[Trajectory], old: Sequence[Trajectory], *, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference in success (new - old) on common graded tasks, each counted once with the mean of its
    runs, with a 95 % bootstrap interval over programs."""
    after, before = _task_means(new), _task_means(old)
    both = [key for key in after if key in before]
    cluster = {run.task.key: cluster_of(run.task) for run in new}
    return paired_bootstrap(
        [after[key] for key in both], [before[key] for key in both], seed,
        clusters=[cluster[key] for key in both],
    )  # fmt: skip


def _task_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    outcomes: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        value = outcome(trajectory.verdict)
        if value is not None:
            outcomes[trajectory.task.key].append(value)
    return {key: sum(values) / len(values) for key, values in outcomes.items()}


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    seed: int,
    *,
    clusters: Sequence[str] | None = None,
    resamples: int = 4000,
) -> tuple[float, float, float]:
    """(mean of a - b over paired tasks, low, high), a 95 % percentile interval; `clusters` names the cluster
    of each task. Raises ValueError if the sequences are empty or differ in length."""
    if not a or len(a) != len(b):
        raise ValueError(f"a and b must pair up and not be empty, but have lengths {len(a)} and {len(b)}")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    names = clusters if clusters is not None else list(map(str, range(len(a))))
    return bootstrap(by_cluster(zip(names, differences, strict=True)), seed, resamples=resamples)
