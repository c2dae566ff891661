"""A group: the rollouts of one task, whose rewards share a baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from nano_shared.types import Limits, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """The columns of one run in a group that are needed to choose among runs."""

    id: str
    started: float
    version: int
    """policy version of its oldest turn"""
    reward: float
    """NaN if there is none, or if the failure was not the policy's"""
    log: int = 0
    """index of its log among those that are read"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task from any source: fresh, logged, or forked.

    Raises ValueError if it is empty, a run appears twice, a trajectory has another task key, or two tasks
    share the key and differ in content.
    """

    task_key: str
    """`Trajectory.group_key`: the key of the task, for forks of a step with run and step appended"""
    trajectories: tuple[Trajectory, ...]
    """[G]"""

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError(f"group {self.task_key!r} has no trajectories")
        run, count = Counter(t.id for t in self.trajectories).most_common(1)[0]
        if count > 1:
            raise ValueError(f"group {self.task_key!r} holds run {run!r} {count} times; a run counts once")
        strangers = {t.group_key for t in self.trajectories} - {self.task_key}
        if strangers:
            raise ValueError(f"group {self.task_key!r} holds rollouts of other tasks: {sorted(strangers)}")
        # a command may override the limits (`--limit`)
        tasks = (t.task.listed.model_copy(update={"limits": Limits()}) for t in self.trajectories)
        contents = {task.id for task in tasks}
        if len(contents) > 1:
            raise ValueError(
                f"group {self.task_key!r} mixes {len(contents)} tasks under one key;"
                " rewards of different tasks share no baseline, give each task its own key"
            )

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """[G] rewards; NaN if there is none, or if the failure was not the policy's."""
        return tuple(_reward(t) for t in self.trajectories)

    @property
    def members(self) -> tuple[GroupMember, ...]:
        """[G]"""
        return tuple(
            GroupMember(id=t.id, started=t.started, version=sampled_by(t), reward=_reward(t))
            for t in self.trajectories
        )

    @property
    def task(self) -> Task:
        return self.trajectories[0].task

    def only(self, runs: Sequence[str]) -> Group:
        """The group restricted to these runs, in this order."""
        by_id = {t.id: t for t in self.trajectories}
        return replace(self, trajectories=tuple(by_id[run] for run in runs))

    def load(self) -> Group:
        """The group itself, as `LoggedGroup.load`."""
        return self

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Policy versions that sampled any turn of the group, ascending."""
        versions = {turn.completion.policy_version for t in self.trajectories for turn in t.turns}
        return tuple(sorted(versions))

    @property
    def forked(self) -> bool:
        """True if its rollouts are forks: they began at a step of another run."""
        return self.task_key != self.trajectories[0].task.key

    @property
    def singleton(self) -> bool:
        """True if fewer than two rollouts are scored."""
        return sum(not math.isnan(r) for r in self.rewards_G) < 2

    @property
    def dead(self) -> bool:
        """True if all rewards are equal, so that every advantage is 0."""
        return is_dead(self.rewards_G)


def sampled_by(run: Trajectory) -> int:
    """The policy version of the oldest turn of a run; 0 without turns."""
    return min((turn.completion.policy_version for turn in run.turns), default=0)


def form_groups(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Groups by `group_key`, in the order of first appearance; the forks of a step are one group."""
    by_key: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_key.setdefault(trajectory.group_key, []).append(trajectory)
    return [Group(task_key=key, trajectories=tuple(members)) for key, members in by_key.items()]


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the rewards of a step, over groups and rollouts.

    `frac_zero_std`: groups with equal rewards; `frac_singleton`: groups with fewer than two scored rollouts,
    which are part of the former; `frac_unscored`: rollouts without a reward; `frac_truncated`: rollouts cut
    off by a limit. `reward_mean`, `reward_min`, `reward_max` and `reward_std` (mean of the deviations within
    groups) are absent if nothing was scored. Under TRL's names: sampled tokens of a rollout
    (`completions/...`), tool calls a rollout (`tools/call_frequency`) and the share of them that failed.
    """
    rewards = [r for group in groups for r in group.rewards_G]
    scored = [r for r in rewards if not math.isnan(r)]
    metrics = {
        "groups": float(len(groups)),
        "rollouts": float(len(rewards)),
        "frac_zero_std": sum(g.dead for g in groups) / max(len(groups), 1),
        "frac_singleton": sum(g.singleton for g in groups) / max(len(groups), 1),
        "frac_unscored": 1 - len(scored) / max(len(rewards), 1),
        "frac_truncated": sum(_cut_off(t) for g in groups for t in g.trajectories) / max(len(rewards), 1),
    }
    if scored:
        mean = math.fsum(scored) / len(scored)
        metrics |= {"reward_mean": mean, "reward_min": min(scored), "reward_max": max(scored)}
        within = [[r for r in g.rewards_G if not math.isnan(r)] for g in groups]
        deviations = [stdev(rewards) for rewards in within if len(rewards) > 1]
        metrics["reward_std"] = fmean(deviations) if deviations else 0.0
    return metrics | _completion_metrics([t for g in groups for t in g.trajectories])


def _completion_metrics(runs: Sequence[Trajectory]) -> dict[str, float]:
    if not runs:  # a step of imitation or preferences alone
        return {}
    lengths = sorted(run.num_sampled_tokens for run in runs)
    whole = [run.num_sampled_tokens for run in runs if not _cut_off(run)]
    seen = [o.ok for run in runs for turn in run.turns for o in turn.observations]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(lengths[0]),
        "completions/max_length": float(lengths[-1]),
        "completions/p95_length": float(lengths[math.ceil(0.95 * len(lengths)) - 1]),
        "tools/call_frequency": len(seen) / len(runs),
        "tools/failure_frequency": seen.count(False) / max(1, len(seen)),
    }
    return metrics | ({"completions/mean_terminated_length": fmean(whole)} if whole else {})


def row_tokens(run: Trajectory) -> int:
    """Tokens of the longest row of a run."""
    rows: Counter[int] = Counter()
    for turn in run.turns:
        if tokens := turn.completion.tokens:
            rows[tokens.row] += len(tokens.context_ids) + len(tokens.sampled_ids)
    return max(rows.values(), default=0)


def _cut_off(trajectory: Trajectory) -> bool:
    """True if a limit ended the run or its last completion."""
    if trajectory.stop is not None and (trajectory.stop.budget or trajectory.stop.ours):
        return trajectory.stop.budget
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish.is_cut


def _reward(trajectory: Trajectory) -> float:
    ours = trajectory.stop is not None and trajectory.stop.ours
    return math.nan if ours or trajectory.reward is None else trajectory.reward


def is_dead(rewards: Sequence[float | None]) -> bool:
    """True if fewer than two rollouts are scored, or all rewards are equal."""
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    return len(scored) < 2 or all(r == scored[0] for r in scored)
