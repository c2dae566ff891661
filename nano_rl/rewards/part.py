"""A part of a reward: settings and a way to score the rollouts of one task between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.learn.config.objective import Config
from nano_shared.errors import UsageError
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one part says of one rollout."""

    value: float | None
    """between 0 and 1; None where the part has nothing to say, or where it failed"""
    failure: str | None = None
    """kind of the failure, where the part should have spoken and could not"""
    turns: tuple[float, ...] | None = None
    """[T] each turn's share of the value; they add up to it"""
    details: dict[str, float] = field(default_factory=dict)
    """what the value was made from, logged beside it as `part.detail`"""


SILENT = Score(value=None)


class Part(Config):
    """Settings of one part. Subclasses are the parts; `registry.py` names them.

    `argument` is the setting that may follow the part's name on the command line, `name:argument=weight`.
    """

    argument: ClassVar[str | None] = None
    alone: ClassVar[bool] = False
    """judges results by itself, so it may stand where `tests` is missing"""
    costly: ClassVar[bool] = False
    """scored only where it can count: behind the gate"""

    weight: float = Field(1.0, ge=0)
    """share of the reward before all weights are scaled to 1; 0 logs the part and counts nothing"""

    @classmethod
    def unnamed(cls) -> str | None:
        """What `argument` is where a command line gives none; None leaves the setting's default. Raises
        UsageError where it must be given."""
        return None

    def prepare(self) -> None:
        """Refuse settings that cannot work, before anything is rolled out. Raises ConfigError."""

    def score(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Score]:
        """[G] one score for each rollout of one task, in order."""
        return [self.score_run(run, runtime) for run in runs]

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """The score of one rollout, for parts that look at each alone."""
        raise NotImplementedError


def checked(name: str, run: Trajectory, score: Score) -> Score:
    """The score, if it is one. Raises UsageError for a value that is no number between 0 and 1."""
    for label, value in (("", score.value), *((f".{k}", v) for k, v in score.details.items())):
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
            raise UsageError(
                f"reward part {name}{label} gave {value} to run {run.id}; a score lies between 0 and 1"
            )
    if score.turns is not None:
        if len(score.turns) != len(run.turns) or not all(map(math.isfinite, score.turns)):
            raise UsageError(
                f"reward part {name} gave {len(score.turns)} turn rewards to run {run.id}, which has"
                f" {len(run.turns)} turns; it must give one finite number a turn"
            )
        if score.value is None or not math.isclose(math.fsum(score.turns), score.value, abs_tol=1e-9):
            raise UsageError(
                f"reward part {name}: the turn rewards of run {run.id} do not add up to its score"
            )
    return score
