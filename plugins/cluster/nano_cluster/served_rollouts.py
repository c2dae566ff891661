"""Rollouts on servers that hold the trained adapter, and of further steps ahead by a bound on staleness.

    bound 2    roll out 0   roll out 1 and 2 (v0) ...  roll out 3 (from v1)  ...
    trainer                 learn 0 -> v1   learn 1 -> v2   ...

Servers take new weights while they sample: a rollout that crosses an update goes on with the newer weights at
its next turn, and each turn carries its version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from nano_cluster.adapter_publisher import ADAPTERS, AdapterPublisher, open_publisher
from nano_cluster.engine_pool import AnnounceAdapter
from nano_cluster.ray_rollouts import RayRollouts
from nano_cluster.rollout_queue import QueueGatherer
from nano_coder.models.opening import OpenedWeights
from nano_coder.run.execution import Runtime
from nano_rl.checkpoints.checkpoint import save_adapter
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import OnRun, collect
from nano_rl.gather.step_groups import RolloutBatch, Sources

AT_ONCE = 2
"""steps that are rolled out at a time: the next begins while the last rollouts of one end"""


def open_gatherer(
    sources: Sources, opened: OpenedWeights, runtime: Runtime, config: TrainConfig, folder: Path,
    on_change: Callable[[str], None],
) -> ServedGatherer:  # fmt: skip
    """Gathers from the servers of `config.engine`, by agents here or on Ray."""
    workers = None
    if config.ray is not None:
        from nano_cluster.ray_setup import open_training_workers

        workers = open_training_workers(opened, runtime, config, folder, on_change)
    save = partial(save_adapter, opened=opened)
    announce: AnnounceAdapter = workers.announce if workers else lambda *_: ()
    publisher = open_publisher(opened, folder / ADAPTERS, save, config, on_change, announce)
    return ServedGatherer(sources, config, publisher, workers)


@dataclass(slots=True)
class Pacing:
    """When the rollouts of a step may begin, so that no token is too old when it is trained. Step k is
    trained by policy version k and may begin at version k - bound: none of its tokens is more than `bound`
    versions old then, nothing has to be discarded, and at most bound + 1 steps are under way."""

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


class ServedGatherer(QueueGatherer):
    """With a bound of 0 no further step is under way, as with Gatherer."""

    def __init__(
        self, sources: Sources, config: TrainConfig, weights: AdapterPublisher,
        workers: RayRollouts | None = None,
    ) -> None:  # fmt: skip
        """Without `workers` rollouts run here."""
        at_once = min(config.off_policy_bound + 1, AT_ONCE)
        super().__init__(sources, config, workers.collect if workers else collect, at_once=at_once)
        self._weights, self._workers = weights, workers
        self._replaced = 0
        self._pacing = Pacing(bound=config.off_policy_bound, steps=config.steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers:
            self._workers.close()
        self._weights.close()
        super().__exit__(kind, error, trace)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> RolloutBatch:
        """As QueueGatherer. Raises PolicyError if no server serves the weights."""
        began = time.monotonic()
        live = self._weights.follow(runtime, version)
        synced = time.monotonic() - began
        self._begin(self._pacing.advance(step), live)
        batch = super().gather(live, step, version, on_run)
        values = {"steps_ahead": float(len(self._queued)), "seconds_sync": synced, **self._weights.metrics()}
        before = self._replaced
        if self._workers:
            values |= self._workers.metrics()
            self._replaced = self._workers.replaced
        values["worker_restarts"] = float(self._replaced - before)
        return replace(batch, metrics=batch.metrics | values)

    def state(self) -> dict[str, Any]:
        """The state of a gatherer, and the tasks of the steps that are under way."""
        return {**super().state(), "ahead": {str(step): keys for step, keys in self._keys_ahead().items()}}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._queue({int(step): keys for step, keys in state["ahead"].items()})
