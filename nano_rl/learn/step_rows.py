"""The rows of one step's groups, each with its advantage, and the critic's lessons on the same rows."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nano_rl.learn.config.objective import Baseline, ObjectiveConfig, Std
from nano_rl.learn.credit.advantage import group_advantages
from nano_rl.learn.credit.baselines import Baselines
from nano_rl.learn.credit.gae import reward_chain
from nano_rl.learn.credit.turns import RewardParts, turn_rewards
from nano_rl.learn.model.critic import Critic, Lesson
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample, recent_samples, to_samples
from nano_rl.learn.staleness import aged


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    samples_of: list[list[TrainSample]]
    """[groups] the rows of each; no group is empty"""
    lessons_of: list[list[Lesson]]
    """[groups] what the critic learns from each; empty without a critic"""

    @classmethod
    def compared(
        cls,
        groups: Sequence[Group],
        objective: ObjectiveConfig,
        reward: RewardParts | None,
        baselines: Baselines,
    ) -> StepRows:
        """Credit by comparison: within the group, or with what `baselines` expect."""
        credits = baselines.credit(groups, objective, reward)
        rows = [group_samples(g, advantages_G=c) for g, c in zip(groups, credits, strict=True)]
        return cls(samples_of=rows, lessons_of=[[] for _ in groups])

    @classmethod
    def valued(cls, groups: Sequence[Group], objective: ObjectiveConfig, critic: Critic) -> StepRows:
        """Credit by GAE under the critic's values; rollouts without a reward leave."""
        chains = [
            [
                reward_chain(run, earned)
                for run, earned in zip(group.trajectories, turn_rewards(group, objective), strict=True)
                if earned is not None
            ]
            for group in groups
        ]
        lessons = iter(critic.lessons([chain for of_group in chains for chain in of_group]))
        lessons_of = [[lesson for _ in of_group for lesson in next(lessons)] for of_group in chains]
        return cls(
            samples_of=[[x.sample for x in of_group] for of_group in lessons_of], lessons_of=lessons_of
        )

    @property
    def samples(self) -> list[TrainSample]:
        return [sample for of_group in self.samples_of for sample in of_group]

    @property
    def lessons(self) -> list[Lesson]:
        return [lesson for of_group in self.lessons_of for lesson in of_group]

    def aged(self, born: Mapping[str, int]) -> StepRows:
        """No token is younger than its run is known to be."""
        return StepRows(
            samples_of=[aged(samples, born) for samples in self.samples_of],
            lessons_of=[
                [replace(lesson, sample=aged([lesson.sample], born)[0]) for lesson in of_group]
                for of_group in self.lessons_of
            ],
        )

    def recent(self, version: int, limit: int | None) -> tuple[StepRows, int]:
        """The groups that have something left to train without tokens that are too old, and their number."""
        dropped = 0
        kept: list[tuple[list[TrainSample], list[Lesson]]] = []
        for samples, lessons in zip(self.samples_of, self.lessons_of, strict=True):
            recent, gone = recent_samples(samples, version, limit)
            dropped += gone
            taught = [
                replace(lesson, sample=sample)
                for lesson in lessons
                for sample in recent_samples([lesson.sample], version, limit)[0]
            ]
            if recent:
                kept.append((recent, taught))
        return _of(kept), dropped

    def without(self, gone: Container[str]) -> StepRows:
        """The groups that have something left without some runs."""
        return _of(
            (rows, [lesson for lesson in lessons if lesson.sample.run_id not in gone])
            for samples, lessons in zip(self.samples_of, self.lessons_of, strict=True)
            if (rows := [sample for sample in samples if sample.run_id not in gone])
        )


def _of(kept: Iterable[tuple[list[TrainSample], list[Lesson]]]) -> StepRows:
    pairs = list(kept)
    return StepRows(samples_of=[rows for rows, _ in pairs], lessons_of=[lessons for _, lessons in pairs])


def group_samples(
    group: Group,
    *,
    baseline: Baseline = "mean",
    std: Std = "none",
    eps: float = 1e-4,
    advantages_G: Sequence[float | Sequence[float] | None] | None = None,
) -> list[TrainSample]:
    """The samples of a group. A rollout without a reward leaves the loss as it leaves the baseline.

    `advantages_G` are advantages of another making (`credit/turns.py`), each one number, one for each turn,
    or None for a rollout that leaves the loss.
    """
    rewards_G = group.rewards_G
    if advantages_G is None:
        advantages_G = group_advantages(rewards_G, baseline=baseline, std=std, eps=eps)
    members = zip(group.trajectories, rewards_G, advantages_G, strict=True)
    # a prompt that fills the context leaves a run without a turn, which is compared and has nothing to train
    learned = ((t, a) for t, reward, a in members if not math.isnan(reward) and t.own_turns)
    return [s for t, a in learned if a is not None for s in to_samples(t, a)]
