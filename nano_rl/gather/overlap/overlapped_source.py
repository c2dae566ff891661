"""Rollouts of the next step while the trainer learns from the last, one policy version behind it.

    worker     roll out 0   roll out 1 (v0)   roll out 2 (v1)   ...
    trainer                 learn 0 -> v1     learn 1 -> v2     ...

The buffer holds one step. While the groups of a step are learned from, the worker rolls out the next one with
the weights from before that update: step k > 0 is sampled by version k - 1, always, so that under lockstep a
seed decides the training bit for bit. Which tasks come next is decided here, at the same place of every step,
and the rewards are given here; the worker runs and grades, and writes to the log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.models.opening import OpenedWeights
from nano_coder.models.weights import BASE
from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.overlap.remote_rollouts import RemoteRollouts
from nano_rl.gather.overlap.rollout_request import Opening, ProbeRow, RolloutRequest
from nano_rl.gather.rollouts import OnRun
from nano_rl.gather.sources import Gathered, Gatherer, Sources
from nano_rl.learn.model.first_look import mean_and_max
from nano_rl.learn.model.probe import Probe
from nano_rl.rewards import Reward
from nano_shared.errors import UsageError
from nano_shared.facts import facts_of
from nano_shared.types import Task, Trajectory

NOT_FROM_LOGS = (
    "--overlap rolls out tasks ahead, and groups that begin in a log are not drawn ahead: give --tasks FILE"
    " instead of --from-logs, or leave --overlap out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The tasks of a step whose rollouts are not learned from yet, and the policy that samples them."""

    step: int
    version: int
    tasks: tuple[Task, ...]
    weights: dict[str, Tensor]
    """those that train, as they were"""
    probe: Probe | None = None
    """a row of the step before with the log-probs that these weights give it; None after a restart"""


class OverlappedGatherer(Gatherer):
    """Gathers a step and has the next one rolled out meanwhile."""

    def __init__(
        self,
        model: nn.Module,
        opened: OpenedWeights,
        runtime: Runtime,
        sources: Sources,
        config: TrainConfig,
        reward: Reward | None,
        on_restart: Callable[[str], None],
    ) -> None:
        """`on_restart` hears of each worker that had to be replaced. Raises UsageError for groups of logs."""
        if sources.from_logs:
            raise UsageError(NOT_FROM_LOGS)
        super().__init__(sources, config, reward)
        self._model = model
        self._threads = torch.get_num_threads()
        self._rollouts = RemoteRollouts(
            _opening(opened, runtime, config),
            threads=max(1, self._threads // 2),
            patience=config.heartbeat_seconds,
            on_restart=on_restart,
        )
        self._ahead: Ahead | None = None

    def __enter__(self) -> OverlappedGatherer:
        # threads of both on the same cores would wait for each other in every product
        torch.set_num_threads(max(1, self._threads - self._threads // 2))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rollouts.close()
        torch.set_num_threads(self._threads)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> Gathered:
        """The groups of one step, after which the next one is under way. The weights are those of `version`,
        and may move when this returns."""
        restarts = self._rollouts.restarts
        # the first step, also of those that --steps adds, has nothing to overlap with
        ahead = self._ahead = self._ahead or self._next(step, version)
        gathered = super().gather(runtime, step, version, on_run)
        self._ahead = None
        seen = self._seen(ahead)
        if step + 1 < self._config.steps:
            self._ahead = replace(self._next(step + 1, version), probe=Probe.of(gathered.groups, self._model))
            tasks = self._ahead.tasks
            self._submit(tasks, [self._config.group_size] * len(tasks), runtime, step + 1)
        restarts = self._rollouts.restarts - restarts
        behind = version - ahead.version
        sampled_by = ahead.weights if behind else None
        return replace(gathered, behind=behind, restarts=restarts, sampled_by=sampled_by, seen=seen)

    def state(self) -> dict[str, Any]:
        """As of any gatherer, and what was drawn ahead, with the weights that sample it."""
        ahead = self._ahead
        told = ahead and {
            "step": ahead.step,
            "version": ahead.version,
            "tasks": [task.key for task in ahead.tasks],
            "weights": ahead.weights,
        }
        return {**super().state(), "ahead": told}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        told = state["ahead"]
        if told is not None:
            by_key = {task.key: task for task in self._sources.tasks}
            tasks = tuple(by_key[key] for key in told["tasks"])
            self._ahead = Ahead(
                step=told["step"], version=told["version"], tasks=tasks, weights=told["weights"]
            )

    def _seen(self, ahead: Ahead) -> dict[str, float]:
        """`worker_mismatch`: how far the log-probs of the probe are in the worker from those that its weights
        give it here, mean and largest, nats."""
        if ahead.probe is None or self._rollouts.scored is None:
            return {}
        return mean_and_max("worker_mismatch", [ahead.probe.gap_N(self._rollouts.scored)])

    def _next(self, step: int, version: int) -> Ahead:
        """Draw the tasks of a step, for the weights as they are."""
        tasks = self._draw(step, self._config.prompts_per_step, taken=())
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        weights = self._rollouts.publish(trained, version)
        return Ahead(step=step, version=version, tasks=tuple(tasks), weights=weights)

    def _first(self, step: int) -> list[Task]:
        assert self._ahead is not None
        assert self._ahead.step == step
        return list(self._ahead.tasks)

    def _roll_each(
        self,
        tasks: Sequence[Task],
        missing: Mapping[str, int],
        runtime: Runtime,
        step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:
        """Those under way, or further ones of the same step (refill), which the same weights sample."""
        if not self._rollouts.under_way:
            self._submit(tasks, [missing[task.key] for task in tasks], runtime, step)
        runs = []
        for name in self._rollouts.take():
            run = runtime.store.get(name)
            if on_run:
                on_run(run)
            # of a run that the log scrubbed, the log-probs belong to another prompt than can be read
            if not any(turn.redacted for turn in facts_of(run).turns):
                runs.append(run)
        if self._reward:
            runs = self._reward.apply(runs, runtime)
        return {task.key: [run for run in runs if run.task.key == task.key] for task in tasks}

    def _submit(self, tasks: Sequence[Task], sizes: Sequence[int], runtime: Runtime, step: int) -> None:
        assert self._ahead is not None
        self._rollouts.publish(self._ahead.weights, self._ahead.version)
        self._rollouts.submit(
            RolloutRequest(
                version=self._ahead.version,
                weights=self._rollouts.weights_file(),
                seed=self.seed(step),
                sampling=runtime.sampling,
                tasks=tuple(tasks),
                sizes=tuple(sizes),
                probe=_row(self._ahead.probe),
            )
        )


def _row(probe: Probe | None) -> ProbeRow | None:
    if probe is None:
        return None
    batch = probe.batch
    return ProbeRow(
        ids=tuple(batch.ids_BT[0].tolist()), first=probe.places[0], temperature=batch.temperature_B[0].item()
    )


def _opening(opened: OpenedWeights, runtime: Runtime, config: TrainConfig) -> Opening:
    loaded = opened.loaded
    folder = BASE if loaded.kind == "base" else loaded.path
    return Opening(
        trainer=os.getpid(),
        model=str(folder or loaded.id.partition("@")[0]),  # a hub's model is named with its commit
        model_id=loaded.id,
        dtype=config.dtype,
        lora_rank=config.lora_rank,
        seed=config.seed,
        profile=opened.profile.name,
        runtime_profile=runtime.profile.name,
        scheduler=config.scheduler,
        log=runtime.store.address,
        blobs=str(runtime.store.blobs.root),
        policy_name=runtime.policy_name,
        limits=dict(runtime.limits),
    )
