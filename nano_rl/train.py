"""The training loop: groups from fresh rollouts or the log, then one update, until the steps are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nano_coder.runtime import OpenedWeights, Runtime, local_policy
from nano_rl.config import TrainConfig
from nano_rl.controls import controls_due, hack_metrics, roll_controls
from nano_rl.gather import Sources, gather
from nano_rl.group import group_metrics
from nano_rl.learner import Learner
from nano_rl.metrics import METRICS, MetricsWriter
from nano_rl.reference import Reference
from nano_rl.rewards import Reward
from nano_rl.rollout import OnRun
from nano_rl.update import learn
from nano_shared.errors import UsageError

OnStep = Callable[[int, int, dict[str, float]], None]
"""steps done, steps in all, metrics of the last one"""
STATE = "state.pt"


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
            policy = local_policy(
                replace(opened.loaded, model=model),
                opened.profile,
                version=version,
                scheduler=config.scheduler,
            )
            live = replace(runtime, policy=policy)
            groups = gather(sources, live, config, step, on_run, reward)
            due = controls_due(step, len(groups) * config.group_size, config.controls)
            controls = roll_controls(
                sources.every_task, live, reward, step=step, due=due, seed=config.seed, on_run=on_run
            )
            rolled = time.monotonic()
            values = {**group_metrics(groups), "step": float(step)}
            values |= hack_metrics([t for g in groups for t in g.trajectories], controls)
            values |= learn(learner, reference, groups, values, config, version, state["history"], reward)
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
