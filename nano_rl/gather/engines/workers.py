"""The contract of workers that execute rollouts elsewhere; those of the plug-in cluster are actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nano_coder.models.opening import OpenedWeights
from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.engines.adapter_probe import PublishedAdapter
from nano_rl.gather.engines.engine_pool import EngineState
from nano_rl.gather.rollouts import RollOut
from nano_shared.extensions import Extensions

if TYPE_CHECKING:
    from torch import nn

    from nano_coder.config import AgentConfig
    from nano_rl.learn.config import OptimizerConfig
    from nano_rl.learn.model.learner import Learner


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


class RolloutCluster(Protocol):
    """Places rollouts on other machines, for `--ray ADDRESS`: an extension of `nano.workers`, a module."""

    def open_training_workers(
        self, opened: OpenedWeights, runtime: Runtime, config: TrainConfig, folder: Path,
        on_change: Callable[[str], None],
    ) -> Workers:  # fmt: skip
        """Workers that sample from the servers of `config.engine`."""
        ...

    def open_rollout_workers(
        self, runtime: Runtime, config: AgentConfig, address: str, workers: int | None,
        on_change: Callable[[str], None],
    ) -> Workers:  # fmt: skip
        """Workers of a hosted model, which `config` names."""
        ...


class RankedTraining(Protocol):
    """Trains in the processes that torchrun starts: an extension of `nano.learners`, a module."""

    def run_ranks(self, command: Callable[[], None]) -> None:
        """Run the command line on rank 0, and follow it on the others."""
        ...

    def leader(self) -> Any:
        """This process among the ranks: `size`, and `beside`, how many others this machine has; None if it
        does not lead them."""
        ...

    def open_sharded(
        self, ranks: Any, model_name: str, settings: TrainConfig, folder: Path, model: nn.Module,
        config: OptimizerConfig, *, steps: int,
    ) -> Learner:  # fmt: skip
        """The learner of rank 0, with the model spread over all ranks."""
        ...


ROLLOUT_CLUSTERS: Extensions[RolloutCluster] = Extensions("nano.workers")
RANKED_TRAININGS: Extensions[RankedTraining] = Extensions("nano.learners")
_started: list[RankedTraining] = []


def run_on_ranks(command: Callable[[], None]) -> None:
    """As `RankedTraining.run_ranks` of the installed one. Raises ConfigError where there is none."""
    _started.append(RANKED_TRAININGS.find("ranks"))
    _started[0].run_ranks(command)


def started_ranks() -> RankedTraining | None:
    """What torchrun's processes train with; None in a process that torchrun did not start."""
    return _started[0] if _started else None
