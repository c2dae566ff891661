"""Rollouts of further steps in threads, while one step is learned from.

    trainer                 learn 0 -> v1   learn 1 -> v2   ...
    roll out 0 (v0)         roll out 1 (v0)   roll out 2 (v1)   ...

Tasks are drawn here, in the order of the steps, and composed rewards are computed here. A copy of the weights
(`WeightsCopy`) is one update behind, so that under the lockstep scheduler a seed determines the training bit
for bit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import OnRun, RollOut, collect
from nano_rl.gather.step_groups import Gatherer, RolloutBatch, Sources, by_group
from nano_rl.learn.groups import Group
from nano_shared.types import Task, Trajectory


class WeightsCopy:
    """A copy of the trained weights in this process, which changes between two steps alone."""

    def __init__(self, opened: OpenedWeights, config: TrainConfig) -> None:
        model = opened.loaded.model
        frozen: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
        self._model, self._opened, self._scheduler = model, opened, config.scheduler
        self._copy: nn.Module = copy.deepcopy(model, frozen)
        self.version = opened.version
        self.trained: dict[str, Tensor] = {}
        """the trained weights that are sampled from"""
        self._threads = torch.get_num_threads()
        # threads of both on the same cores would wait for each other in every matrix product
        torch.set_num_threads(max(1, self._threads - self._threads // 2))

    def follow(self, runtime: Runtime, version: int) -> Runtime:
        self.load(
            {n: p.detach().clone() for n, p in self._model.named_parameters() if p.requires_grad}, version
        )
        return self.sampled_by(runtime)

    def load(self, trained: Mapping[str, Tensor], version: int) -> None:
        self.trained, self.version = dict(trained), version
        parameters = dict(self._copy.named_parameters())
        for name, value in self.trained.items():
            parameters[name].data = value.to(parameters[name].device)

    def sampled_by(self, runtime: Runtime) -> Runtime:
        loaded = replace(self._opened.loaded, model=self._copy)
        policy = local_policy(loaded, self._opened.profile, version=self.version, scheduler=self._scheduler)
        return replace(runtime, policy=policy)

    def close(self) -> None:
        torch.set_num_threads(self._threads)


@dataclass(slots=True)
class QueuedStep:
    tasks: tuple[Task, ...]
    runs: Future[list[Trajectory]] | None = None
    """None after a restart, until it is begun again"""


class QueueGatherer(Gatherer):
    """Gathers a step, while further ones are under way: its subclasses say when those begin."""

    def __init__(
        self, sources: Sources, config: TrainConfig, roll_out: RollOut = collect, *, at_once: int = 1
    ) -> None:
        """`at_once`: steps that are rolled out at a time."""
        super().__init__(sources, config, roll_out)
        self._queued: dict[int, QueuedStep] = {}
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="step")
        self._waited = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> RolloutBatch:
        """The groups of one step; later rollouts may still run. Raises what those of the step raised."""
        self._waited = 0.0
        batch = super().gather(runtime, step, version, on_run)
        values = staleness(batch.groups, version)
        values |= {"seconds_waited": self._waited, "staleness": values["staleness_max"]}
        return replace(
            batch, metrics=batch.metrics | values, off_policy_steps=int(values["staleness_max"])
        )  # fmt: skip

    def _queue(self, tasks_of: Mapping[int, Sequence[str]]) -> None:
        """Queue the steps of a saved state, by the keys of their tasks."""
        by_key = {task.key: task for task in self._sources.tasks}
        self._queued = {
            step: QueuedStep(tasks=tuple(by_key[key] for key in keys)) for step, keys in tasks_of.items()
        }

    def _keys_ahead(self) -> dict[int, list[str]]:
        return {step: [task.key for task in one.tasks] for step, one in self._queued.items()}

    def _begin(self, steps: Iterable[int], live: Runtime) -> None:
        for step in () if self._sources.from_logs else steps:
            if step not in self._queued:  # those of a saved state are drawn
                self._queued[step] = QueuedStep(tasks=tuple(super()._initial_tasks(step)))
            self._queued[step].runs = self._threads.submit(
                self._roll_out, self._queued[step].tasks, live, group_size=self._config.group_size,
                seed=self.seed(step),
            )  # fmt: skip

    def _initial_tasks(self, step: int) -> list[Task]:
        queued = self._queued.get(step)
        return list(queued.tasks) if queued else super()._initial_tasks(step)

    def _roll_each(
        self, tasks: Sequence[Task], missing: Mapping[str, int], runtime: Runtime, step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:  # fmt: skip
        """The rollouts that are under way; for a refill further ones."""
        queued = self._queued.pop(step, None)
        if queued is None:
            return super()._roll_each(tasks, missing, runtime, step, on_run)
        assert queued.runs is not None
        began = time.monotonic()
        runs = queued.runs.result()
        self._waited += time.monotonic() - began
        for run in runs if on_run else ():
            on_run(run)
        if self._sources.reward:
            runs = self._sources.reward.apply(runs, runtime)
        return by_group(tasks, runs)


class AheadGatherer(QueueGatherer):
    """Rolls out the next step with a copy of the weights, while one is learned from."""

    def __init__(self, sources: Sources, config: TrainConfig, opened: OpenedWeights) -> None:
        super().__init__(sources, config)
        self._weights = WeightsCopy(opened, config)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._weights.close()
        super().__exit__(kind, error, trace)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> RolloutBatch:
        sampled_by = self._weights.trained if self._weights.version < version else None
        live = self._weights.sampled_by(runtime) if step in self._queued else runtime
        if step in self._queued and self._queued[step].runs is None:  # of a saved state
            self._begin([step], live)
        batch = super().gather(live, step, version, on_run)
        if step + 1 < self._config.steps:
            self._begin([step + 1], self._weights.follow(runtime, version))
        values = {"steps_ahead": float(len(self._queued)), "worker_restarts": 0.0}
        return replace(batch, metrics=batch.metrics | values, behaviour_weights=sampled_by)

    def state(self) -> dict[str, Any]:
        """The state of a gatherer, and the step that is under way with the weights that sample it."""
        ahead = None
        for step, keys in self._keys_ahead().items():
            ahead = {
                "step": step, "version": self._weights.version, "tasks": keys,
                "weights": self._weights.trained,
            }  # fmt: skip
        return {**super().state(), "ahead": ahead}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if (ahead := state["ahead"]) is not None:
            self._weights.load(ahead["weights"], ahead["version"])
            self._queue({ahead["step"]: ahead["tasks"]})


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """`staleness_mean` and `staleness_max`, versions between sampling and training of a sampled token, and
    `stale_tokens`, those sampled by older versions."""
    ages = [
        (version - turn.completion.policy_version, len(turn.completion.tokens.sampled_ids))
        for group in groups
        for run in group.trajectories
        for turn in run.own_turns
        if turn.completion.tokens
    ]
    tokens = sum(count for _, count in ages)
    return {
        "staleness_mean": sum(age * count for age, count in ages) / max(1, tokens),
        "staleness_max": float(max((age for age, _ in ages), default=0)),
        "stale_tokens": float(sum(count for age, count in ages if age)),
    }


def open_gatherer(
    sources: Sources, opened: OpenedWeights, runtime: Runtime, config: TrainConfig, folder: Path,
    on_change: Callable[[str], None],
) -> AheadGatherer:  # fmt: skip
    """Gathers a step ahead with a copy of the weights."""
    return AheadGatherer(sources, config, opened)
