"""The training loop. A step gathers groups, makes rows of tokens, updates the policy, and saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from nano_coder import __version__ as runtime_version
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime
from nano_rl.command_setup import PLANS
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import HeldOut, RollOut, collect, hack_metrics, success_metrics
from nano_rl.gather.step_groups import CONTROLS, GATHERERS, Gatherer, Sources, pair_term
from nano_rl.learn.groups import Group, group_metrics, row_tokens
from nano_rl.learn.guards import Probe, check_update
from nano_rl.learn.learner import RANKED_TRAININGS, Learner, started_ranks
from nano_rl.learn.logprob import refuse_untrainable
from nano_rl.learn.metrics import METRICS, MetricsWriter, dashboard_names
from nano_rl.learn.train_step import CRITICS, Updater
from nano_rl.learn.utilisation import FlopCounter, utilisation
from nano_rl.resume import (
    STATES,
    Identity,
    Progress,
    States,
    TrainingStopped,
    interruptible,
    saved_progress,
    seed_all,
    usual_save_every,
)
from nano_rl.training_record import USED, EventKind, Phases, UsedRuns, Watch, note
from nano_shared.errors import UsageError
from nano_shared.extension_points import source_hashes
from nano_shared.files import content_hash
from nano_shared.printable import printable
from nano_shared.process import return_freed_memory
from nano_shared.types import Sampling, Trajectory


def train(
    model: nn.Module,
    opened: OpenedWeights,
    runtime: Runtime,
    sources: Sources,
    config: TrainConfig,
    folder: Path,
    watch: Watch = Watch(),  # noqa: B008 (frozen)
) -> list[str]:
    """Train `model` in place, continuing from a state saved in `folder`. Returns the ids of the runs used.

    `runtime` makes the rollouts; each step gives it the current weights, and samples over the whole
    vocabulary. A training on logs alone ends when their runs are used up. Raises CheckpointError for a saved
    state of another model, other tasks or other settings; GuardTripped, with the last saved state on disk, up
    to `save_every` steps back; TrainingStopped after a signal, with the last step on disk; PolicyError or
    SandboxError if every rollout of a step failed for a reason that is not the policy's.
    """
    if not (sources.tasks or sources.from_logs):
        raise UsageError(
            "there is nothing to train on: no task to roll out and no logged group with a signal"
        )
    refuse_untrainable(model)
    opened = replace(opened, loaded=replace(opened.loaded, model=model))
    updater = _open_updater(model, runtime, config, folder)
    identity, learner = identify(opened, runtime, sources, config), updater.learner
    with States(folder / STATES).claimed() as states, interruptible() as interrupt:
        # a saved state is always continued; with `resume` there must be one, and some settings may differ
        if saved := saved_progress(states, identity, resume=config.resume):
            sources = sources.only(saved["logged"], runtime.store.blobs)
        updater = replace(updater, terms=_terms(opened, runtime, sources, config))
        roll_out: RollOut = learner.roll_out or collect
        gatherer = _open_gatherer(opened, runtime, sources, config, folder, learner, roll_out)
        progress = Progress(learner, gatherer, sources, states, identity)
        if saved:
            progress.restore(saved)
        else:
            seed_all(config.seed)
            progress.save()
        save_every = config.save_every or usual_save_every(model)
        held_out = HeldOut(tasks=sources.held_out, folder=folder, seed=config.seed, roll_out=roll_out)
        used, flops = UsedRuns(folder / USED, step=learner.step), FlopCounter(model)
        phases = Phases(ahead=config.off_policy_bound)
        with gatherer, MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
            while learner.step < config.steps and not (interrupt.requested or watch.enough()):
                step, version = learner.step, opened.version + learner.step
                live = _current_runtime(opened, runtime, config, version)
                measured = held_out.measure(live, step, config.steps)  # about ten times in all

                # 1. gather: groups of rollouts of each task, fresh, from logs, or both
                with phases("rollout"):
                    batch = gatherer.gather(live, step, version, watch.on_run)
                    if batch.exhausted:
                        break
                    controls: list[Trajectory] = []
                    if config.controls:  # impossible tasks, a share of the rollouts, never trained on
                        rolled_out = len(batch.groups) * config.group_size
                        roll = CONTROLS.find("impossible")
                        controls = roll(
                            sources, live, config, step=step, rollouts=rolled_out, on_run=watch.on_run
                        )
                watch.on_groups(step, batch.groups, controls)
                runs = [run for group in batch.groups for run in group.trajectories]
                values = {**group_metrics(batch.groups), **success_metrics(batch.groups), **batch.metrics}
                values |= {"step": float(step), **hack_metrics(runs, controls)}
                with phases("save"):
                    states.join()  # its weights change now, and `note_best` counts only what is on disk
                with_signal = [c.group for c in batch.credited if c.has_signal]
                _refuse_long_row(model, with_signal, config)

                with phases("train"), flops():
                    progress.note_best(values, off_policy_steps=batch.off_policy_steps)
                    # a row, preferably a trained one, whose log-probs are compared before and after
                    probe = Probe.of([*with_signal, *batch.groups], model)
                    # 2. rows: tokens with their advantage, the group's or a critic's, none too stale
                    rows = updater.credit(batch, version)
                    # 3. update: loss, gradient, guards, weights; `learner.step` goes on by one
                    values |= updater.update(rows, values, probe, version, progress.history)
                    values |= _check_after_update(values, probe, opened, config, version + 1)
                    values |= gatherer.record(batch.credited)
                values |= phases.metrics([*runs, *controls], trained_tokens=values.get("tokens", 0.0))
                values |= utilisation(values, flops, model, config) | measured
                values |= dashboard_names(values)
                return_freed_memory()

                # 4. save: the runs, the metrics, and every `save_every` steps the state
                used.append(step, batch.groups)
                metrics.write(step, values)
                progress.history = [*progress.history, values][-config.guards.patience :]
                if learner.step % save_every == 0:
                    progress.save()
                watch.on_step(learner.step, config.steps, values)
        progress.save()
        if not interrupt.requested:
            live = _current_runtime(opened, runtime, config, opened.version + learner.step)
            held_out.measure(live, learner.step, config.steps)
    if interrupt.requested and learner.step < config.steps:
        raise TrainingStopped(learner.step, config.steps, folder)
    return [*used.run_ids, *(run for term in updater.terms for run in term.run_ids)]


def _open_updater(model: nn.Module, runtime: Runtime, config: TrainConfig, folder: Path) -> Updater:
    """What updates the weights: in this process, or in all those that torchrun started."""
    terms = config.objective.terms
    ranks = started.leader() if (started := started_ranks()) else None
    open_learner: Callable[..., Learner] = Learner
    if ranks:
        open_sharded = RANKED_TRAININGS.find("ranks").open_sharded
        open_learner = partial(open_sharded, ranks, runtime.policy_name, config, folder)
    learner = open_learner(model, config.optimizer, steps=config.steps)
    reference = learner.reference() if terms.needs_reference else None
    critic = None
    if terms.critic:
        critic = CRITICS.find("ppo")(model, config)
        learner.attach("critic", critic)
    return Updater(learner=learner, config=config, reference=reference, critic=critic)


def identify(opened: OpenedWeights, runtime: Runtime, sources: Sources, config: TrainConfig) -> Identity:
    completion = runtime.sampling.max_tokens
    said = {"completion": completion} if completion != Sampling().max_tokens else {}
    return Identity(
        code_version=runtime_version,
        model=opened.loaded.id,
        model_name=runtime.policy_name,
        profile_hash=opened.profile.hash,
        template_hash=content_hash(opened.profile.chat_template or opened.loaded.chat_template),
        tasks=sources.hash,
        config=config.model_dump(mode="json"),
        limits={**runtime.settings.limits, **said},
        code=source_hashes(),
    )


def _terms(opened: OpenedWeights, runtime: Runtime, sources: Sources, config: TrainConfig) -> list[Any]:
    """The losses beside that of the policy: imitation and preferences."""
    terms = []
    if config.lambda_sft:
        from nano_rl.imitation import imitation_term

        terms.append(imitation_term(config, sources.every_task, runtime, opened, sources.rest))
    if paired := pair_term(config):
        terms.append(paired.preference_term(opened.loaded.model, opened, sources.pairs, config))
    return [term for term in terms if term is not None]


def _open_gatherer(
    opened: OpenedWeights, runtime: Runtime, sources: Sources, config: TrainConfig, folder: Path,
    learner: Learner, roll_out: RollOut,
) -> Gatherer:  # fmt: skip
    """The gatherer: rollouts of each step when it comes, or of further steps ahead, here or on servers."""
    if not (config.engine or config.off_policy_bound):
        return Gatherer(sources, config, roll_out)

    def changed(why: str) -> None:
        print(f"nano: {printable(why)}", file=sys.stderr)
        note(folder, EventKind.WORKER, learner.step, why)

    gatherer = GATHERERS.find("servers" if config.engine else "ahead")
    return gatherer(sources, opened, runtime, config, folder, changed)


def _current_runtime(opened: OpenedWeights, runtime: Runtime, config: TrainConfig, version: int) -> Runtime:
    policy = local_policy(opened.loaded, opened.profile, version=version, scheduler=config.scheduler)
    pinned = {"temperature": config.temperature, "top_p": 1.0, "top_k": 0}
    return replace(runtime, policy=policy, sampling=runtime.sampling.model_copy(update=pinned))


def _check_after_update(
    values: dict[str, float], probe: Probe | None, opened: OpenedWeights, config: TrainConfig, version: int
) -> dict[str, float]:
    """Metrics of the probe after the update, checked by the guards. Raises GuardTripped."""
    if probe is None or values.get("skipped"):
        return {}
    model, policy = opened.loaded.model, local_policy(opened.loaded, opened.profile, version=version)
    # elsewhere these weights decode nothing, and need not be laid out for it
    here = not (config.engine or config.off_policy_bound)
    sampler = policy.engine.score_decoding if here else policy.engine.score_alone
    measured = probe.metrics(model, sampler)
    if here and hasattr(model, "peft_config"):
        measured |= probe.arrives(model, sampler)
    check_update({**values, **measured}, config.guards, bfloat16=config.dtype == "bfloat16")
    return measured


def _refuse_long_row(model: nn.Module, groups: Sequence[Group], config: TrainConfig) -> None:
    """Raises UsageError for a row longer than `max_tokens`, which is a micro-batch of its own, that does not
    fit into what memory is free, as far as an installed plan says."""
    longest = max((row_tokens(run) for group in groups for run in group.trajectories), default=0)
    if longest > config.max_tokens and "memory" in PLANS:
        PLANS["memory"].refuse_long_row(model, longest, config)
