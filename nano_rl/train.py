"""The training loop: gather groups from fresh rollouts or logs, update the policy, repeat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nano_coder import __version__ as runtime_version
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.models.weights import build_empty
from nano_coder.run.execution import Runtime
from nano_rl.checkpoints.checkpoint import save_adapter
from nano_rl.config.training import TrainConfig
from nano_rl.gather.engines.adapter_publisher import ADAPTERS, open_publisher
from nano_rl.gather.engines.paced_source import PacedGatherer
from nano_rl.gather.engines.workers import OpenWorkers
from nano_rl.gather.impossible_rollouts import controls_due, hack_metrics, roll_controls
from nano_rl.gather.overlapped_source import OverlappedGatherer
from nano_rl.gather.rollouts import OnRun, failed, none_graded
from nano_rl.gather.sources import Gatherer, Sources, pair_term
from nano_rl.gather.success import HeldOut, success_metrics
from nano_rl.imitation.demonstrations import imitation_term
from nano_rl.learn.guards import check_update
from nano_rl.learn.metrics import METRICS, MetricsWriter, dashboard_names
from nano_rl.learn.mismatch import Probe
from nano_rl.learn.model.critic import open_critic
from nano_rl.learn.model.flops import FlopCounter, measured_flops, memory_metrics
from nano_rl.learn.model.learner import Learner, OpenLearner, Reference
from nano_rl.learn.model.logprob import refuse_untrainable
from nano_rl.learn.model.plan import available_bytes, row_bytes
from nano_rl.learn.objectives.controls import Controls
from nano_rl.learn.offline import OnStep
from nano_rl.learn.rows.group import Group, group_metrics, row_tokens
from nano_rl.learn.update import Updater
from nano_rl.logs.used_runs import USED, UsedRuns
from nano_rl.record import SHORTEST, EventKind, Phases, note
from nano_rl.resume.progress import (
    Progress,
    TrainingStopped,
    interruptible,
    saved_progress,
    seed_all,
    usual_save_every,
)
from nano_rl.resume.states import STATES, Identity, States
from nano_rl.rewards import Reward
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.malloc import return_freed_memory
from nano_shared.printable import printable
from nano_shared.types import Sampling, Trajectory
from nano_shared.user_code import source_hashes

OnGroups = Callable[[int, Sequence[Group], Sequence[Trajectory]], None]
"""step, its groups and its control rollouts, before they are learned from"""


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
    on_groups: OnGroups | None = None,
    held_out: HeldOut | None = None,
    open_learner: OpenLearner = Learner,
    open_workers: OpenWorkers | None = None,
) -> list[str]:
    """Train `model` in place, continuing from a state saved in `folder`. Returns the ids of the runs used.

    `runtime` makes the rollouts; at each step its policy is replaced by the current weights, and its sampling
    by the temperature of `config` over the whole vocabulary. `reward` is `config.reward`, opened; None uses
    the rewards of the grader. `held_out` tasks are measured during training and never trained on.
    `open_learner` makes what updates the weights, and `open_workers` workers that roll out elsewhere; None is
    here. A training on logs alone ends when their runs are used up.

    Raises CheckpointError for a saved state of another model, other tasks or other settings; GuardTripped,
    with the state before that step on disk; TrainingStopped after a signal, with the last step on disk.
    """
    if not (sources.tasks or sources.from_logs):
        raise UsageError(
            "there is nothing to train on: no task to roll out and no logged group with a signal"
        )
    refuse_untrainable(model)
    controls = Controls(config.objective, config.temperature, ahead=config.off_policy_bound > 0)
    updater = _open_updater(model, config, reward, controls, open_learner)
    learner = updater.learner
    identity = identify(opened, runtime, sources, config)
    with States(folder / STATES, keep=config.keep_states).claimed() as states, interruptible() as interrupt:
        saved = saved_progress(states, identity, resume=config.resume)
        if saved:
            sources = sources.only(saved["logged"], runtime.store.blobs)
        imitation = imitation_term(config, sources.every_task, runtime, opened, sources.rest)
        paired = pair_term(config)
        preferences = paired.preference_term(model, opened, sources.pairs, config) if paired else None
        terms = [term for term in (imitation, preferences) if term is not None]
        updater = replace(updater, terms=terms)
        gatherer = _gatherer(model, opened, runtime, sources, config, reward, folder, learner, open_workers)
        progress = Progress(learner, gatherer, sources, states, identity)
        if saved:
            progress.restore(saved)
        else:
            seed_all(config.seed)
            progress.save()
        save_every = config.save_every or usual_save_every(model)
        used, phases = UsedRuns(folder / USED, step=learner.step), Phases(ahead=config.off_policy_bound)
        stepper = _Stepper(
            model=model, opened=opened, runtime=runtime, sources=sources, updater=updater, config=config,
            reward=reward, gatherer=gatherer,
            progress=progress, states=states, phases=phases, on_run=on_run, on_groups=on_groups,
            flops=FlopCounter(model), controls=controls,
        )  # fmt: skip
        with gatherer, MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
            while learner.step < config.steps and not interrupt.requested:
                step = learner.step
                measured = stepper.measure(held_out, step)
                if (taken := stepper.take(step)) is None:
                    break
                groups, values = taken[0], taken[1] | measured
                return_freed_memory()
                used.append(step, groups)
                metrics.write(step, values)
                progress.note(values, config.guards.patience)
                if learner.step % save_every == 0:
                    progress.save()
                on_step(learner.step, config.steps, values)
        progress.save()
        if not interrupt.requested:
            stepper.measure(held_out, learner.step)
    if interrupt.requested and learner.step < config.steps:
        raise TrainingStopped(
            f"stopped after step {learner.step} of {config.steps}, which is saved under {folder}; the same"
            " command goes on from there"
        )
    return [*used.run_ids, *(run for term in terms for run in term.run_ids)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stepper:
    """The parts of a training that each step uses."""

    model: nn.Module
    opened: OpenedWeights
    runtime: Runtime
    sources: Sources
    updater: Updater
    config: TrainConfig
    reward: Reward | None
    gatherer: Gatherer
    progress: Progress
    states: States
    phases: Phases
    on_run: OnRun | None
    on_groups: OnGroups | None
    flops: FlopCounter
    controls: Controls

    def measure(self, held_out: HeldOut | None, step: int) -> dict[str, float]:
        """Success on held-out tasks after `step` updates; empty unless a measurement is due."""
        config = self.config
        if held_out is None or not held_out.due(step, config.steps):
            return {}
        version = self.opened.version + step
        live = _live(self.runtime, self.model, self.opened, config, version, config.temperature)
        return held_out.measure(live, step)

    def take(self, step: int) -> tuple[list[Group], dict[str, float]] | None:
        """Gather, learn, check. Returns the groups and metrics of the step; None if the logs are used up.

        Raises GuardTripped, and PolicyError or SandboxError if every rollout failed for a reason that is not
        the policy's; the weights are unchanged then.
        """
        config, reward, phases = self.config, self.reward, self.phases
        version, temperature = self.opened.version + step, self.controls.now.temperature
        live = _live(self.runtime, self.model, self.opened, config, version, temperature)
        with phases("rollout"):
            gathered = self.gatherer.gather(live, step, version, self.on_run)
            groups = gathered.groups
            if gathered.exhausted:
                return None
            fresh = [run for g in groups for run in g.trajectories if run.id not in gathered.logged]
            if fresh and all(map(failed, fresh)):
                raise none_graded(fresh)
            due = controls_due(step, len(groups) * config.group_size, config.controls)
            controls = roll_controls(
                self.sources.every_task, live, reward, step=step, due=due, seed=config.seed,
                on_run=self.on_run,
            )  # fmt: skip
        runs = [t for g in groups for t in g.trajectories]
        if self.on_groups:
            self.on_groups(step, groups, controls)
        values = {**group_metrics(groups), **success_metrics(groups), **gathered.metrics}
        values |= {"step": float(step), **hack_metrics(runs, controls)}
        with phases("save"):
            self.states.join()
        with_signal = [c.group for c in gathered.credited if c.has_signal]
        longest = max((row_tokens(run) for group in with_signal for run in group.trajectories), default=0)
        _refuse_long_row(self.model, longest, config)
        with phases("train"), self.flops():
            self.progress.judge(values, off_policy_steps=gathered.off_policy_steps or 0)
            # preferably a row that is trained on
            probe = Probe.of([*with_signal, *groups], self.model)
            values |= self._controlled().learn(
                gathered.credited, values, version=version, history=self.progress.history,
                logged=gathered.logged, baselines=self.gatherer.baselines, probe=probe,
                behaviour_weights=gathered.behaviour_weights,
            )  # fmt: skip
            values |= _checked(values, probe, self.model, self.opened, config, version + 1)
            values |= self.gatherer.record(gathered.credited)
            values |= self.controls.after(values, step + 1)
        values |= phases.metrics([*runs, *controls], trained_tokens=values.get("tokens", 0.0))
        values |= self._utilisation(values) | dashboard_names(values)
        return groups, values

    def _controlled(self) -> Updater:
        """The updater with the objective of this step, after its reference was refreshed if that is due."""
        updater, objective = self.updater, self.config.objective
        if not self.controls:
            return updater
        if self.controls.now.refresh and updater.reference is not None:
            updater.reference.refresh()
        changed = {"objective": self.controls.applied(objective)}
        return replace(updater, config=self.config.model_copy(update=changed))

    def _utilisation(self, values: Mapping[str, float]) -> dict[str, float]:
        """`perf/mfu/actor` of the training part of a step, and memory."""
        weight = next(self.model.parameters())
        tokens, seconds = values.get("tokens", 0.0), values.get("seconds_train", 0.0)
        metrics = memory_metrics(weight.device)
        if tokens and seconds >= SHORTEST:
            dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
            peak = self.config.peak_tflops and 1e12 * self.config.peak_tflops
            done = self.flops.total(tokens * self.config.updates_per_step)
            metrics["perf/mfu/actor"] = done / seconds / (peak or measured_flops(weight.device, dtype))
        return metrics


def _open_updater(
    model: nn.Module, config: TrainConfig, reward: Reward | None, controls: Controls,
    open_learner: OpenLearner,
) -> Updater:  # fmt: skip
    """What updates the weights, with the parts whose state is saved beside them; no loss terms yet."""
    reference = Reference(model) if config.objective.beta > 0 else None
    learner = open_learner(model, config.optimizer, steps=config.steps)
    critic = open_critic(model, config)
    if critic is not None:
        learner.attach("critic", critic)
    if controls:
        learner.attach("controls", controls)
        if reference is not None:
            learner.attach("reference", reference)
    return Updater(learner=learner, config=config, reward=reward, reference=reference, critic=critic)


def identify(opened: OpenedWeights, runtime: Runtime, sources: Sources, config: TrainConfig) -> Identity:
    """The identity of a training: everything that determines its steps."""
    return Identity(
        code_version=runtime_version,
        model=opened.loaded.id,
        model_name=runtime.policy_name,
        profile_hash=opened.profile.hash,
        template_hash=content_hash(opened.profile.chat_template or opened.loaded.chat_template),
        tasks=sources.hash,
        config=config.model_dump(mode="json"),
        limits=_limits(runtime),
        code=source_hashes(),
    )


def _limits(runtime: Runtime) -> dict[str, Any]:
    usual = Sampling().max_tokens
    completion = runtime.sampling.max_tokens
    return {**runtime.settings.limits, **({"completion": completion} if completion != usual else {})}


def _gatherer(
    model: nn.Module, opened: OpenedWeights, runtime: Runtime, sources: Sources, config: TrainConfig,
    reward: Reward | None, folder: Path, learner: Learner, open_workers: OpenWorkers | None,
) -> Gatherer:  # fmt: skip
    """The gatherer: rollouts in this process, one step ahead in a worker process, or on servers."""
    bound = config.off_policy_bound

    def changed(why: str) -> None:
        print(f"nano: {printable(why)}", file=sys.stderr)
        note(folder, EventKind.WORKER, learner.step, why)

    if bound and not config.engine:
        return OverlappedGatherer(model, opened, runtime, sources, config, reward, changed)
    if not (config.engine or config.asynchronous):
        return Gatherer(sources, config, reward)
    workers = open_workers(opened, runtime, config, folder, changed) if open_workers else None
    publisher = None
    if config.engine:
        publisher = open_publisher(
            model, opened, folder / ADAPTERS, partial(save_adapter, opened=opened), config, changed, workers
        )
    return PacedGatherer(sources, config, reward, publisher, bound=bound, workers=workers)


def _live(
    runtime: Runtime,
    model: nn.Module,
    opened: OpenedWeights,
    config: TrainConfig,
    version: int,
    temperature: float,
) -> Runtime:
    """The runtime with the current weights as policy, sampling from the whole vocabulary."""
    loaded = replace(opened.loaded, model=model)
    policy = local_policy(loaded, opened.profile, version=version, scheduler=config.scheduler)
    pinned = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    return replace(runtime, policy=policy, sampling=runtime.sampling.model_copy(update=pinned))


def _checked(
    values: dict[str, float],
    probe: Probe | None,
    model: nn.Module,
    opened: OpenedWeights,
    config: TrainConfig,
    version: int,
) -> dict[str, float]:
    """Metrics of the probe after the update, checked by the guards. Raises GuardTripped."""
    if probe is None or values.get("skipped"):
        return {}
    policy = local_policy(replace(opened.loaded, model=model), opened.profile, version=version)
    # elsewhere this process decodes nothing, and need not lay out the weights for it
    here = not (config.engine or config.asynchronous or config.off_policy_bound)
    sampler = policy.engine.score_decoding if here else policy.engine.score_alone
    measured = probe.metrics(model, sampler)
    if here and hasattr(model, "peft_config"):
        measured |= probe.arrives(model, sampler)
    check_update({**values, **measured}, config.guards, bfloat16=config.dtype == "bfloat16")
    return measured


def _refuse_long_row(model: nn.Module, longest: int, config: TrainConfig) -> None:
    """Raises UsageError for a row longer than `max_tokens`, which is a micro-batch of its own, that does not
    fit into what memory is free."""
    if longest <= config.max_tokens:
        return
    device = next(model.parameters()).device
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        skeleton = build_empty(causal.config, next(causal.parameters()).dtype)
    kept = config.model_copy(update={"gradient_checkpointing": True})
    need, least, room = (
        row_bytes(skeleton, config, longest, device), row_bytes(skeleton, kept, longest, device),
        available_bytes(device),
    )  # fmt: skip
    if need <= room:
        return
    helps = f"gradient_checkpointing = true takes {least / 2**30:.1f} GiB" if least <= room else ""
    raise UsageError(
        f"a row of {longest} tokens takes {need / 2**30:.1f} GiB to learn from, and {room / 2**30:.1f}"
        f" GiB are free on {device}: {helps or 'no setting makes it fit'}; --limit max_run_tokens=N keeps"
        " rollouts shorter (the last step is saved; another setting needs another --name)"
    )
