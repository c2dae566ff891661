"""Where the groups of a step come from: fresh rollouts, the log, or the log topped up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from nano_coder.runtime import Runtime
from nano_rl.config import TrainConfig
from nano_rl.curriculum import Curriculum
from nano_rl.group import Group, form_groups
from nano_rl.rewards import Reward
from nano_rl.rollout import OnRun, collect
from nano_shared.types import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where groups come from: tasks to roll out afresh, logged groups, or both."""

    tasks: tuple[Task, ...] = ()
    logged: tuple[Group, ...] = ()
    curriculum: Curriculum | None = None
    """chooses among `tasks` by their success so far; None takes them in turn"""

    @property
    def every_task(self) -> tuple[Task, ...]:
        return self.tasks or tuple(g.trajectories[0].task for g in self.logged)


def gather(
    sources: Sources,
    runtime: Runtime,
    config: TrainConfig,
    step: int,
    on_run: OnRun | None,
    reward: Reward | None = None,
) -> list[Group]:
    """The groups of one step: logged, topped up with fresh rollouts of the same tasks, or fresh alone."""
    if sources.logged:
        chosen = _slice(sources.logged, step, config.prompts_per_step, config.seed)
        if not config.group_size:
            return chosen
        fresh = _roll([g.trajectories[0].task for g in chosen], runtime, config, step, on_run, reward)
        by_key = {group.task_key: group for group in fresh}
        return [replace(g, trajectories=(*g.trajectories, *by_key[g.task_key].trajectories)) for g in chosen]
    if sources.curriculum is not None:
        chosen_tasks = sources.curriculum.draw(step, config.prompts_per_step)
    else:
        chosen_tasks = _slice(sources.tasks, step, config.prompts_per_step, config.seed)
    return _roll(chosen_tasks, runtime, config, step, on_run, reward)


def _roll(
    tasks: Sequence[Task],
    runtime: Runtime,
    config: TrainConfig,
    step: int,
    on_run: OnRun | None,
    reward: Reward | None,
) -> list[Group]:
    seed = config.seed * 1_000_003 + step
    size = config.group_size
    return form_groups(collect(tasks, runtime, group_size=size, seed=seed, on_run=on_run, reward=reward))


def _slice(items: Sequence[T], step: int, size: int, seed: int) -> list[T]:
    """The items of one step, without repeats: a slice of the endless sequence of seeded permutations."""
    size = min(size, len(items))
    per_epoch = len(items) // size
    order = list(items)
    Random(f"{seed} {step // per_epoch}").shuffle(order)
    start = step % per_epoch * size
    return order[start : start + size]
