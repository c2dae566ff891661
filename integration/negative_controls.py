"""Mistakes of this field, put into the trainer on purpose: what they cost is what the rest is worth.

- `wrong_groups`: group ids are mixed up, so that a rollout is compared with those of other tasks.
- `shuffled_rewards`: the verdicts of a step are permuted over its rollouts, so that nothing can be learned.
- `mask_off`: every token of a row is trained, the prompt and what tools answered as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from nano_rl.learn import train_step
from nano_rl.learn.advantages import RolloutBatch, credit_group
from nano_rl.learn.groups import Group, TrainSample
from nano_rl.learn.objectives import RECIPE
from nano_rl.learn.train_step import StepRows, Updater


def dealt_over_tasks(groups: Sequence[Group]) -> list[Group]:
    """As many groups, of the same rollouts and sizes: each is dealt the rollouts of all tasks in turn.

    They are told to be of one task, for a group refuses strangers.
    """
    runs = [run for place in range(_largest(groups)) for g in groups for run in g.trajectories[place:][:1]]
    dealt = iter(runs)
    return [
        replace(
            g, trajectories=tuple(next(dealt).model_copy(update={"task": own.task}) for own in g.trajectories)
        )
        for g in groups
    ]


def unmasked(sample: TrainSample) -> TrainSample:
    """The same row with every token trained but the first, which nothing predicts."""
    return replace(sample, mask=(0, *(1 for _ in sample.ids[1:])))


def shuffled(groups: Sequence[Group], random: Random) -> list[Group]:
    """The negative control: the verdicts permuted over the rollouts of the step."""
    # turn rewards are dropped: the other rollout may have another number of turns
    verdicts = [
        t.verdict and t.verdict.model_copy(update={"turn_rewards": None})
        for g in groups
        for t in g.trajectories
    ]
    random.shuffle(verdicts)
    return [
        replace(
            g, trajectories=tuple(t.model_copy(update={"verdict": verdicts.pop()}) for t in g.trajectories)
        )
        for g in groups
    ]


NO_WEIGHTS = RECIPE.with_terms(tis_cap=None)
"""for `mask_off`: the sampler gave no log-prob for most of the tokens"""


@contextmanager
def _credited(mix: Callable[[list[Group], Random], list[Group]]) -> Iterator[None]:
    """Within, steps learn from what `mix` makes of their groups."""
    credit = Updater.credit

    def mixed(self: Updater, batch: RolloutBatch, version: int) -> StepRows:
        random = Random(f"mixed {self.config.seed} {self.learner.step}")
        dealt = mix([credited.group for credited in batch.credited if credited.has_signal], random)
        terms = self.config.objective.terms
        return credit(
            self, replace(batch, credited=[credit_group(group, terms, None) for group in dealt]), version
        )

    with patch.object(Updater, "credit", mixed):
        yield


def shuffled_rewards() -> AbstractContextManager[None]:
    """Within, the verdicts of a step are permuted over its rollouts, so that nothing can be learned."""
    return _credited(shuffled)


def wrong_groups() -> AbstractContextManager[None]:
    """Within, steps learn from groups that were mixed up."""
    return _credited(lambda groups, _: dealt_over_tasks(groups))


@contextmanager
def mask_off() -> Iterator[None]:
    """Within, policy gradients train every token. The sampler gave no log-prob for most of them: train
    without importance weights (NO_WEIGHTS) and without the guard on the mismatch."""
    samples = train_step.group_samples

    def whole(*arguments: Any, **more: Any) -> list[TrainSample]:
        return [unmasked(sample) for sample in samples(*arguments, **more)]

    with patch("nano_rl.learn.train_step.group_samples", whole):
        yield


def _largest(groups: Sequence[Group]) -> int:
    return max((len(g.trajectories) for g in groups), default=0)
