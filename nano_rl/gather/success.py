"""What a step's rollouts achieved: the reward with its error and its parts, and success by level."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from nano_rl.learn.metrics import GRADED, PART, SUCCESS
from nano_rl.learn.rows.group import Group
from nano_rl.rewards import outcome
from nano_rl.rewards.outcome import is_composed


def success_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`success/...` and `graded/...` by level, `part/...` of each part of a composed reward, `reward_min` and
    `reward_max` of the step, and `reward_error`, the standard error of the mean reward.

    A success is an outcome of 1: the tests', whatever a composed reward adds. The error is that of the mean
    over groups, since rollouts of one task are no independent draws; absent below two scored groups.
    """
    outcomes: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for run in group.trajectories:
            value = outcome(run.verdict)
            if value is not None:
                outcomes["all"].append(value)
                if run.task.level is not None:
                    outcomes[f"level_{run.task.level}"].append(value)
    metrics: dict[str, float] = {}
    for name, values in sorted(outcomes.items()):
        metrics[f"{SUCCESS}{name}"] = sum(value >= 1 for value in values) / len(values)
        metrics[f"{GRADED}{name}"] = float(len(values))
    metrics |= _parts(groups)
    rewards = [r for group in groups for r in group.rewards_G if not math.isnan(r)]
    if rewards:
        metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    error = _error([_mean(group) for group in groups])
    return metrics if error is None else {**metrics, "reward_error": error}


def _parts(groups: Sequence[Group]) -> dict[str, float]:
    """What each part said, whether it counted or not; its details (`part.detail`) stay in the verdicts."""
    said: dict[str, list[float]] = defaultdict(list)
    for verdict in (run.verdict for group in groups for run in group.trajectories):
        if verdict is not None and is_composed(verdict):
            for name, value in verdict.components.items():
                if value is not None and "." not in name:
                    said[name].append(value)
    return {f"{PART}{name}": math.fsum(values) / len(values) for name, values in sorted(said.items())}


def _mean(group: Group) -> float:
    scored = [r for r in group.rewards_G if not math.isnan(r)]
    return math.fsum(scored) / len(scored) if scored else math.nan


def _error(means: Sequence[float]) -> float | None:
    known = [mean for mean in means if not math.isnan(mean)]
    if len(known) < 2:
        return None
    centre = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((m - centre) ** 2 for m in known) / (len(known) - 1) / len(known))
