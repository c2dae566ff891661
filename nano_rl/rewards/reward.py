"""A reward beside the grader's own: its parts, which users add, and what a training asks of it.

The plug-in preferences composes parts into a reward: the outcome first, shaping behind its gate, each part
logged apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.config import RewardConfig
from nano_shared.extension_points import Extensions
from nano_shared.settings import Config
from nano_shared.types import Task, Trajectory

TESTS = "tests"
"""the part that is the outcome of the hidden checks"""
IMPOSSIBLE = "impossible_passed"
"""kind of tampering: an impossible control task was passed"""


class Reward(Protocol):
    """What runs earn in place of the grader's reward."""

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        """The runs with its verdicts, which are logged in addition to those of the grader."""

    def objectives(self, runs: Sequence[Trajectory]) -> list[tuple[float, list[float | None]]]:
        """(weight, [G] values that count) of each part, for parts that are normalised separately."""

    def probe(self, tasks: Sequence[Task]) -> Reward:
        """Itself, once its parts were checked against the tasks. Raises UsageError or ConfigError."""


class ComposesRewards(Protocol):
    """What reads `--reward`: an extension of `nano.reward_composers`, a module."""

    def parse_reward(self, text: str) -> RewardConfig: ...

    def open_reward(self, config: RewardConfig) -> Reward: ...


COMPOSERS: Extensions[ComposesRewards] = Extensions("nano.reward_composers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    value: float | None
    """between 0 and 1; None if the part does not apply, or if it failed"""
    failure: str | None = None
    """kind of failure, if the part could not compute its score"""
    turns: tuple[float, ...] | None = None
    """[T] share of each turn; their sum is `value`"""
    details: dict[str, float] = field(default_factory=dict)
    """components of the value, logged as `part.detail`"""


SILENT = Score(value=None)


class Part(Config):
    """Base class of reward parts; the fields of a subclass are its settings. `argument` names the setting
    that may follow the part's name on the command line, `name:argument=weight`."""

    argument: ClassVar[str | None] = None
    alone: ClassVar[bool] = False
    """True if the part may be used without `tests`, because it judges results by itself"""
    costly: ClassVar[bool] = False
    """True if the part is expensive, so that it is scored only where the gate lets it count"""

    weight: float = Field(1.0, ge=0)
    """weight before all weights are scaled to a sum of 1; with 0 the part is logged and does not count"""

    @classmethod
    def unnamed(cls) -> str | None:
        """The value of `argument` if the command line gives none; None for the setting's default. Raises
        UsageError if it is required."""
        return None

    def prepare(self) -> None:
        """Check settings and load models before any rollout. Raises ConfigError."""

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Check it against the tasks before the first rollout. Raises UsageError or ConfigError."""

    def score(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Score]:
        """[G] one score for each rollout of one task, in order."""
        return [self.score_run(run, runtime) for run in runs]

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        raise NotImplementedError
