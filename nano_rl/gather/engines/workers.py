"""The contract of workers that execute rollouts elsewhere; those of `nano_rl.scale` are actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from nano_coder.models.opening import OpenedWeights
from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.engines.adapter_probe import PublishedAdapter
from nano_rl.gather.engines.engine_pool import EngineState
from nano_rl.gather.rollouts import RollOut


class Workers(Protocol):
    """Workers that run agents and graders, and write to the log of the trainer."""

    collect: RollOut
    replaced: int
    """workers that were lost and replaced so far"""

    def announce(self, adapter: PublishedAdapter, states: tuple[EngineState, ...]) -> Collection[str]:
        """Have all workers sample from an adapter from now on; the `announce` of an EnginePool."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        ...


OpenWorkers = Callable[[OpenedWeights, Runtime, TrainConfig, Path, Callable[[str], None]], Workers]
"""of (weights, runtime, config, folder of the training, what is told of lost workers)"""
