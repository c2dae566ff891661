"""Overlap: a worker process rolls out the next step while the trainer learns from the last one.

    worker     roll out 0   roll out 1 (v0)   roll out 2 (v1)   ...
    trainer                 learn 0 -> v1     learn 1 -> v2     ...

Rollouts are one step ahead: step k > 0 is sampled by version k - 1, always, so that under the lockstep
scheduler a seed determines the training bit for bit. Tasks are chosen here, at the same point of every step,
and composed rewards are computed here; the worker runs and grades the rollouts and writes them to the log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.config import load_config
from nano_coder.models.opening import OpenedWeights
from nano_coder.models.weights import BASE
from nano_coder.run.execution import Runtime
from nano_coder.tools.registry import TOOLS
from nano_rl.config.training import TrainConfig
from nano_rl.gather.remote_rollouts import RemoteRollouts
from nano_rl.gather.rollout_worker import ProbeRow, RolloutRequest, WorkerConfig
from nano_rl.gather.rollouts import OnRun
from nano_rl.gather.sources import Gathered, Gatherer, Sources, by_group
from nano_rl.learn.mismatch import Probe, mean_and_max
from nano_rl.rewards import Reward
from nano_shared.errors import UsageError
from nano_shared.run_facts import facts_of
from nano_shared.types import Task, Trajectory

NOT_FROM_LOGS = (
    "--async rolls out tasks ahead, and groups that begin in a log are not drawn ahead: give"
    " --tasks FILE instead of --from-logs, or leave the other out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that is being rolled out: its tasks, and the policy that samples them."""

    step: int
    version: int
    tasks: tuple[Task, ...]
    weights: dict[str, Tensor]
    """the trained weights of that version"""
    probe: Probe | None = None
    """a row of the previous step, scored with these weights; None after a restart"""


class OverlappedGatherer(Gatherer):
    """Gathers a step, and starts the rollouts of the next one in a worker process."""

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
        """`on_restart` is called with the reason when a worker is replaced. Raises UsageError for logs."""
        if sources.from_logs:
            raise UsageError(NOT_FROM_LOGS)
        super().__init__(sources, config, reward)
        self._model = model
        self._threads = torch.get_num_threads()
        self._rollouts = RemoteRollouts(
            _worker_config(opened, runtime, config),
            threads=max(1, self._threads // 2),
            patience=config.heartbeat_seconds,
            on_restart=on_restart,
        )
        self._pending: PendingStep | None = None

    def __enter__(self) -> OverlappedGatherer:
        # threads of both processes on the same cores would wait for each other in every matrix product
        torch.set_num_threads(max(1, self._threads - self._threads // 2))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rollouts.close()
        torch.set_num_threads(self._threads)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> Gathered:
        """The groups of one step; the rollouts of the next step are running when this returns.

        The model's weights are those of `version`, and may be updated afterwards.
        """
        restarts = self._rollouts.restarts
        # the first step of a process has nothing to overlap with
        pending = self._pending = self._pending or self._next(step, version)
        gathered = super().gather(runtime, step, version, on_run)
        self._pending = None
        worker_metrics = self._worker_mismatch(pending)
        if step + 1 < self._config.steps:
            probe = Probe.of(gathered.groups, self._model)
            self._pending = replace(self._next(step + 1, version), probe=probe)
            tasks = self._pending.tasks
            self._submit(tasks, [self._config.group_size] * len(tasks), runtime, step + 1)
        restarts = self._rollouts.restarts - restarts
        off_policy_steps = version - pending.version
        return replace(
            gathered, off_policy_steps=off_policy_steps, restarts=restarts, worker_metrics=worker_metrics,
            behaviour_weights=pending.weights if off_policy_steps else None,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The state of a gatherer, and the pending step with the weights that sample it."""
        pending = self._pending
        saved = pending and {
            "step": pending.step,
            "version": pending.version,
            "tasks": [task.key for task in pending.tasks],
            "weights": pending.weights,
        }
        return {**super().state(), "ahead": saved}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        saved = state["ahead"]
        if saved is not None:
            by_key = {task.key: task for task in self._sources.tasks}
            tasks = tuple(by_key[key] for key in saved["tasks"])
            self._pending = PendingStep(
                step=saved["step"], version=saved["version"], tasks=tasks, weights=saved["weights"]
            )

    def _worker_mismatch(self, pending: PendingStep) -> dict[str, float]:
        """`worker_mismatch`: relative gap of the probe's log-probs in the worker and here, under the same
        weights, mean and largest."""
        if pending.probe is None or self._rollouts.scored is None:
            return {}
        return mean_and_max("worker_mismatch", [pending.probe.gap_N(self._rollouts.scored)])

    def _next(self, step: int, version: int) -> PendingStep:
        """Draw the tasks of a step and publish the current weights for it."""
        tasks = self._draw(step, self._config.prompts_per_step, taken=())
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        weights = self._rollouts.publish(trained, version)
        return PendingStep(step=step, version=version, tasks=tuple(tasks), weights=weights)

    def _first(self, step: int) -> list[Task]:
        assert self._pending is not None
        assert self._pending.step == step
        return list(self._pending.tasks)

    def _roll_each(
        self,
        tasks: Sequence[Task],
        missing: Mapping[str, int],
        runtime: Runtime,
        step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:
        """The rollouts that are running, or for a refill further ones of the same step and weights."""
        if not self._rollouts.under_way:
            self._submit(tasks, [missing[task.key] for task in tasks], runtime, step)
        runs = []
        for name in self._rollouts.take():
            run = runtime.store.get(name)
            if on_run:
                on_run(run)
            # in a run that the log redacted, the log-probs belong to a prompt that is not in the log
            if not any(turn.redacted for turn in facts_of(run).turns):
                runs.append(run)
        if self._reward:
            runs = self._reward.apply(runs, runtime)
        return by_group(tasks, runs)

    def _submit(self, tasks: Sequence[Task], sizes: Sequence[int], runtime: Runtime, step: int) -> None:
        assert self._pending is not None
        self._rollouts.publish(self._pending.weights, self._pending.version)
        self._rollouts.submit(
            RolloutRequest(
                version=self._pending.version,
                weights=self._rollouts.weights_file(),
                seed=self.seed(step),
                sampling=runtime.sampling,
                tasks=tuple(tasks),
                sizes=tuple(sizes),
                probe=_row(self._pending.probe),
            )
        )


def _row(probe: Probe | None) -> ProbeRow | None:
    if probe is None:
        return None
    batch = probe.batch
    return ProbeRow(
        ids=tuple(batch.ids_BT[0].tolist()), first=probe.places[0], temperature=batch.temperature_B[0].item()
    )


def _worker_config(opened: OpenedWeights, runtime: Runtime, config: TrainConfig) -> WorkerConfig:
    loaded, ours = opened.loaded, load_config({}, Path())[0]
    folder = BASE if loaded.kind == "base" else loaded.path
    return WorkerConfig(
        trainer=os.getpid(),
        model=str(folder or loaded.id.partition("@")[0]),  # a hub's model is named with its commit
        model_id=loaded.id,
        dtype=config.dtype,
        quantise=config.quantise,
        device=str(next(loaded.model.parameters()).device),
        kv_gib=ours.kv_gib,
        lora_rank=config.lora_rank,
        seed=config.seed,
        profile=opened.profile.name,
        runtime_profile=runtime.profile.name,
        tool_files=TOOLS.files,
        environments=runtime.environments.references,
        scheduler=config.scheduler,
        log=runtime.store.address,
        blobs=runtime.store.blobs.address,
        policy_name=runtime.policy_name,
        limits=dict(runtime.settings.limits),
        hosts=runtime.settings.hosts,
        sandbox=ours.sandbox,
        python=ours.python,
        image=ours.image,
    )
