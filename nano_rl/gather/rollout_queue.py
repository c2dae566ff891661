"""Rollouts of further steps, in threads or on workers elsewhere, while one step is learned from.

    bound 2    roll out 0   roll out 1 and 2 (v0) ...  roll out 3 (from v1)  ...
    trainer                 learn 0 -> v1   learn 1 -> v2   ...

Tasks are drawn here, in the order of the steps, and composed rewards are computed here. Servers take new
weights while they sample: a rollout that crosses an update goes on with the newer weights at its next turn,
and each turn carries its version. A copy of the weights in this process (`WeightsCopy`) is one update behind
and changes between two steps alone, so that under the lockstep scheduler a seed determines the training bit
for bit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import OnRun, Workers, collect
from nano_rl.gather.sources import Gatherer, RolloutBatch, Sources, by_group
from nano_rl.learn.rows import Group
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory

AT_ONCE = 2
"""steps that are rolled out at a time: the next begins while the last rollouts of one end"""
NOT_FROM_LOGS = (
    "--async rolls out tasks ahead, and groups that begin in a log are not drawn ahead: give"
    " --tasks FILE instead of --from-logs, or leave the other out"
)


@dataclass(slots=True)
class Pacing:
    """When the rollouts of a step may begin, so that no token is too old when it is trained.

    Step k is trained by policy version k and may begin at version k - bound: none of its tokens is more than
    `bound` versions old then, nothing has to be discarded, and at most bound + 1 steps are under way.
    """

    bound: int
    """largest number of updates between sampling and training of a token"""
    steps: int
    begun: int = 0
    """steps below this have begun"""
    version: int = field(default=-1, init=False)

    def advance(self, version: int) -> Iterator[int]:
        """The steps that may begin with this version, in order. Raises ValueError if it goes back."""
        if version < self.version:
            raise ValueError(f"version {version} after version {self.version}")
        self.version = version
        self.begun = max(self.begun, version)
        while self.begun < min(self.steps, version + self.bound + 1):
            self.begun += 1
            yield self.begun - 1


class RolloutWeights(Protocol):
    """What rollouts sample from: servers that hold the trained adapter, or a copy in this process."""

    def follow(self, runtime: Runtime, version: int) -> Runtime:
        """Take the weights as they are now. Returns the runtime whose policy samples from them."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class WeightsCopy:
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

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        torch.set_num_threads(self._threads)


@dataclass(slots=True)
class QueuedStep:
    tasks: tuple[Task, ...]
    runs: Future[list[Trajectory]] | None = None
    """None after a restart, until it is begun again"""


class QueueGatherer(Gatherer):
    """Gathers a step, with further ones under way; with a bound of 0 none is, as with Gatherer."""

    def __init__(
        self, sources: Sources, config: TrainConfig, weights: RolloutWeights, workers: Workers | None = None
    ) -> None:
        """Without `workers` rollouts run here. Raises UsageError for logs with a bound above 0."""
        if config.off_policy_bound and sources.from_logs:
            raise UsageError(NOT_FROM_LOGS)
        super().__init__(sources, config, workers.collect if workers else collect)
        self._weights, self._workers = weights, workers
        self._replaced = 0
        self._pacing = Pacing(bound=config.off_policy_bound, steps=config.steps)
        self._queued: dict[int, QueuedStep] = {}
        self._threads = ThreadPoolExecutor(min(self._pacing.bound + 1, AT_ONCE), thread_name_prefix="step")
        self._waited = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers:
            self._workers.close()
        self._weights.close()
        self._threads.shutdown(cancel_futures=True)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> RolloutBatch:
        """The groups of one step; the rollouts of the next ones may be running when this returns. Raises
        PolicyError if no server serves the weights, and what the rollouts of the step raised."""
        self._waited = 0.0
        behind = self._weights if isinstance(self._weights, WeightsCopy) else None
        if behind is None:
            began = time.monotonic()
            live = self._weights.follow(runtime, version)
            synced = {"seconds_sync": time.monotonic() - began}
            self._begin(self._pacing.advance(step), live)
            sampled_by = None
        else:
            synced, sampled_by = {}, behind.trained if behind.version < version else None
            live = behind.sampled_by(runtime) if step in self._queued else runtime
            if step in self._queued and self._queued[step].runs is None:  # of a saved state
                self._begin([step], live)
        batch = super().gather(live, step, version, on_run)
        if behind is not None and step + 1 < self._config.steps:
            self._begin([step + 1], behind.follow(runtime, version))
        values = staleness(batch.groups, version)
        values |= {"steps_ahead": float(len(self._queued)), "seconds_waited": self._waited, **synced}
        values |= self._weights.metrics()
        before = self._replaced
        if self._workers:
            values |= self._workers.metrics()
            self._replaced = self._workers.replaced
        values |= {"staleness": values["staleness_max"], "worker_restarts": float(self._replaced - before)}
        return replace(
            batch, metrics=batch.metrics | values, off_policy_steps=int(values["staleness_max"]),
            behaviour_weights=sampled_by,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The state of a gatherer, and the tasks of the steps that are under way; of a copy of the weights
        the step with the weights that sample it."""
        queued = {step: [task.key for task in one.tasks] for step, one in self._queued.items()}
        ahead: Any = {str(step): keys for step, keys in queued.items()}
        if isinstance(self._weights, WeightsCopy):
            weights, version = self._weights.trained, self._weights.version
            ahead = None
            for step, keys in queued.items():
                ahead = {"step": step, "version": version, "tasks": keys, "weights": weights}
        return {**super().state(), "ahead": ahead}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        ahead = state["ahead"]
        if isinstance(self._weights, WeightsCopy):
            if ahead is not None:
                self._weights.load(ahead["weights"], ahead["version"])
            ahead = {ahead["step"]: ahead["tasks"]} if ahead else {}
        by_key = {task.key: task for task in self._sources.tasks}
        self._queued = {
            int(step): QueuedStep(tasks=tuple(by_key[key] for key in keys)) for step, keys in ahead.items()
        }

    def _begin(self, steps: Iterator[int] | Sequence[int], live: Runtime) -> None:
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
