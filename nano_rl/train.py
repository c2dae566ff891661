"""The training loop: groups from fresh rollouts or the log -> samples -> batches -> one update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from torch import Tensor, nn

from nano_coder.runtime import OpenedWeights, Runtime, local_policy
from nano_rl.batch import Batch, make_batches
from nano_rl.config import TrainConfig
from nano_rl.controls import controls_due, hack_metrics, roll_controls
from nano_rl.credit import group_credit, has_signal
from nano_rl.curriculum import Curriculum
from nano_rl.group import Group, form_groups, group_metrics
from nano_rl.guards import check_step
from nano_rl.learner import Learner
from nano_rl.logprob import score_tokens
from nano_rl.loss import policy_loss
from nano_rl.metrics import METRICS, MetricsWriter
from nano_rl.reference import Reference
from nano_rl.rewards import Reward
from nano_rl.rollout import OnRun, collect
from nano_rl.sample import TrainSample, group_samples
from nano_shared.errors import UsageError
from nano_shared.types import Task

T = TypeVar("T")
OnStep = Callable[[int, int, dict[str, float]], None]
"""steps done, steps in all, metrics of the last one"""
STATE = "state.pt"


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


def train(
    model: nn.Module,
    opened: OpenedWeights,
    runtime: Runtime,
    sources: Sources,
    config: TrainConfig,
    folder: Path,
    on_step: OnStep,
    on_run: OnRun | None = None,
    reward: Reward | None = None,
) -> list[str]:
    """Train in place, going on from a state that lies under `folder`. Returns the ids of the runs used.

    `runtime` says how rollouts are made; its policy is replaced by the live module at each step. `reward` is
    what `config.reward` describes, opened; None takes the grader's own rewards.
    """
    if not (sources.tasks or sources.logged):
        raise UsageError(
            "there is nothing to train on: no task to roll out and no logged group with a signal"
        )
    reference = Reference(model) if config.objective.beta > 0 else None
    learner = Learner(model, config.optimizer, steps=config.steps)
    state: dict[str, Any] = {"used": [], "history": []}
    if (folder / STATE).exists():
        state = learner.load(folder / STATE)
        if sources.curriculum is not None and "curriculum" in state:
            sources.curriculum.restore(state["curriculum"])
    with MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
        while learner.step < config.steps:
            step, started = learner.step, time.monotonic()
            version = opened.version + step
            policy = local_policy(replace(opened.loaded, model=model), opened.profile, version=version)
            live = replace(runtime, policy=policy)
            groups = gather(sources, live, config, step, on_run, reward)
            due = controls_due(step, len(groups) * config.group_size, config.controls)
            controls = roll_controls(
                sources.every_task, live, reward, step=step, due=due, seed=config.seed, on_run=on_run
            )
            rolled = time.monotonic()
            values = {**group_metrics(groups), "step": float(step)}
            values |= hack_metrics([t for g in groups for t in g.trajectories], controls)
            values |= _learn(learner, reference, groups, values, config, version, state["history"], reward)
            if sources.curriculum is not None:
                sources.curriculum.record(groups)
                values |= sources.curriculum.metrics()
                state["curriculum"] = sources.curriculum.state()
            values |= {"seconds_rollout": rolled - started, "seconds_train": time.monotonic() - rolled}
            state["used"] += [t.id for group in groups for t in group.trajectories]
            state["history"] = [*state["history"], values][-config.guards.patience :]
            metrics.write(step, values)
            on_step(learner.step, config.steps, values)
            if learner.step % config.save_every == 0 or learner.step == config.steps:
                learner.save(folder / STATE, state)
    return list(state["used"])


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


def _learn(
    learner: Learner,
    reference: Reference | None,
    groups: Sequence[Group],
    values: dict[str, float],
    config: TrainConfig,
    version: int,
    history: Sequence[dict[str, float]],
    reward: Reward | None,
) -> dict[str, float]:
    """One update on the groups that have a signal; none at all where no group has one."""
    objective = config.objective
    live = [group for group in groups if has_signal(group, objective, reward)]
    if not live:
        check_step(values, config.guards, earlier=history)
        learner.step += 1
        return {"skipped": 1.0}
    if config.shuffle_rewards:
        live = shuffled(live, Random(f"shuffle {config.seed} {learner.step}"))
    samples = [s for g in live for s in group_samples(g, advantages_G=group_credit(g, objective, reward))]
    batches = make_batches(samples, max_tokens=config.max_tokens)
    if reference is not None:
        batches = reference.score(batches)
    stale = _stale(samples, version)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        scores = score_tokens(model, batch)
        return policy_loss(scores.logprobs_BT, batch, objective, entropy_BT=scores.entropy_BT)

    def guard(metrics: dict[str, float]) -> None:
        judged = {**values, **metrics, "stale": stale}
        check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

    return {**learner.update(batches, loss, guard), "stale": stale, "skipped": 0.0}


def _stale(samples: Sequence[TrainSample], version: int) -> float:
    """Share of the trained tokens that an older policy sampled."""
    tokens = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    return sum(v != version for v in tokens) / max(1, len(tokens))


def shuffled(groups: Sequence[Group], random: Random) -> list[Group]:
    """The negative control: the same verdicts, each on another rollout."""
    verdicts = [t.verdict for g in groups for t in g.trajectories]
    random.shuffle(verdicts)
    return [
        replace(
            g, trajectories=tuple(t.model_copy(update={"verdict": verdicts.pop()}) for t in g.trajectories)
        )
        for g in groups
    ]
