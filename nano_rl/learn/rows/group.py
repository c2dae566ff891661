"""A group: the rollouts of one task, whose rewards are compared with each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nano_shared import Finish, Limits, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What choosing among the runs of a group needs to know of one."""

    id: str
    started: float
    version: int
    """the one that its oldest turn names"""
    reward: float
    """NaN where there is none, or where the failure was not the policy's"""
    log: int = 0
    """place of its log among those that are read"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task from any source: fresh, logged, or forked.

    Raises ValueError when it is empty, when a run appears twice, when a trajectory belongs to another task
    key, and when two tasks share the key but not the content.
    """

    task_key: str
    """the task's, or for forks of one step the task's with run and step (`Trajectory.group_key`)"""
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
        contents = {_content(t.task) for t in self.trajectories}
        if len(contents) > 1:
            raise ValueError(
                f"group {self.task_key!r} mixes {len(contents)} tasks under one key;"
                " rewards of different tasks share no baseline, give each task its own key"
            )

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """[G] rewards in float64; NaN where there is none, or where the failure was not the policy's."""
        return tuple(_reward(t) for t in self.trajectories)

    @property
    def members(self) -> tuple[Member, ...]:
        """[G]"""
        return tuple(
            Member(id=t.id, started=t.started, version=sampled_by(t), reward=_reward(t))
            for t in self.trajectories
        )

    @property
    def task(self) -> Task:
        return self.trajectories[0].task

    def only(self, runs: Sequence[str]) -> Group:
        """The group with these of its runs alone, in that order."""
        by_id = {t.id: t for t in self.trajectories}
        return replace(self, trajectories=tuple(by_id[run] for run in runs))

    def load(self) -> Group:
        """Itself: all that it holds is in memory (`LoggedGroup.load`)."""
        return self

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Policy versions that sampled any turn of the group, ascending."""
        versions = {turn.completion.policy_version for t in self.trajectories for turn in t.turns}
        return tuple(sorted(versions))

    @property
    def forked(self) -> bool:
        """Whether its rollouts began at a step of another run, where no fresh rollout of the task does."""
        return self.task_key != self.trajectories[0].task.key

    @property
    def singleton(self) -> bool:
        """Whether fewer than two rollouts are scored, so that nothing can be compared."""
        return sum(not math.isnan(r) for r in self.rewards_G) < 2

    @property
    def dead(self) -> bool:
        """Whether no rollout differs from another, so that every advantage is 0."""
        return is_dead(self.rewards_G)


def _content(task: Task) -> str:
    """Of a task whatever its limits are, which a command may set (`--limit`)."""
    return task.model_copy(update={"limits": Limits()}).id


def sampled_by(run: Trajectory) -> int:
    """The version that the oldest turn of a run names."""
    return min((turn.completion.policy_version for turn in run.turns), default=0)


def form_groups(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Groups by task key, in the order in which the keys first appear; the forks of a step are a group."""
    by_key: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_key.setdefault(trajectory.group_key, []).append(trajectory)
    return [Group(task_key=key, trajectories=tuple(members)) for key, members in by_key.items()]


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step reports about its rewards; statistics count rollouts, never token rows.

    `frac_zero_std` counts groups without variation, `frac_singleton` those with fewer than two scored
    rollouts (a part of the former), `frac_unscored` rollouts without a reward, `frac_truncated` those that
    a limit cut off. The reward keys are absent where nothing was scored.
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
    return metrics


def _cut_off(trajectory: Trajectory) -> bool:
    """Whether a limit ended the run or its last completion, by the reasons given for both."""
    if trajectory.stop is not None and (trajectory.stop.budget or trajectory.stop.ours):
        return trajectory.stop.budget
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish is Finish.LENGTH


def _reward(trajectory: Trajectory) -> float:
    ours = trajectory.stop is not None and trajectory.stop.ours
    return math.nan if ours or trajectory.reward is None else trajectory.reward


def is_dead(rewards: Sequence[float | None]) -> bool:
    """Whether a baseline leaves no signal: fewer than two scored rollouts, or all rewards equal."""
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    return len(scored) < 2 or all(r == scored[0] for r in scored)
