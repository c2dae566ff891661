"""Two mistakes of this field, put into the trainer on purpose: what they cost is what the rest is worth.

- `wrong_groups`: group ids are mixed up, so that a rollout is compared with those of other tasks.
- `mask_off`: every token of a row is trained, the prompt and what tools answered as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nano_rl.learn import step_rows
from nano_rl.learn.advantage import credit_group
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample
from nano_rl.learn.update import Updater


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


@contextmanager
def wrong_groups() -> Iterator[None]:
    """Within, steps learn from groups that were mixed up."""
    learn = Updater.learn

    def mixed(self: Updater, groups: Any, *rest: Any, **more: Any) -> dict[str, float]:
        dealt = dealt_over_tasks([credited.group for credited in groups])
        credited = [credit_group(group, self.config.objective, self.reward) for group in dealt]
        return learn(self, credited, *rest, **more)

    with patch.object(Updater, "learn", mixed):
        yield


@contextmanager
def mask_off() -> Iterator[None]:
    """Within, policy gradients train every token. The sampler gave no log-prob for most of them: train
    without importance weights (`tis_cap` None) and without the guard on the mismatch."""
    samples = step_rows.group_samples

    def whole(*arguments: Any, **more: Any) -> list[TrainSample]:
        return [unmasked(sample) for sample in samples(*arguments, **more)]

    with patch("nano_rl.learn.step_rows.group_samples", whole):
        yield


def _largest(groups: Sequence[Group]) -> int:
    return max((len(g.trajectories) for g in groups), default=0)
