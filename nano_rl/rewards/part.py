"""The base of reward parts: settings, and scores between 0 and 1 for the rollouts of one task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.learn.config import Config
from nano_shared.errors import UsageError
from nano_shared.extensions import read_number
from nano_shared.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one part for one rollout."""

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
    """Base class of reward parts; the fields of a subclass are its settings (see `registry.py`).

    `argument` names the setting that may follow the part's name on the command line, `name:argument=weight`.
    """

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
        """The score of one rollout, for parts that score each rollout separately."""
        raise NotImplementedError


def checked(name: str, run: Trajectory, given: object) -> Score:
    """The score that a part gave, its numbers as floats; a number alone is one.

    Raises UsageError for what is none, values outside 0 to 1, and inconsistent turn shares.
    """
    score = given if isinstance(given, Score) else Score(value=given)  # type: ignore[arg-type]
    value = _between(name, run, score.value)
    details = {key: _between(f"{name}.{key}", run, one) for key, one in score.details.items()}
    turns = None if score.turns is None else tuple(map(read_number, score.turns))
    score = replace(score, value=value, details=details, turns=turns)  # type: ignore[arg-type]
    if score.turns is not None:
        if len(score.turns) != len(run.turns) or not all(
            n is not None and math.isfinite(n) for n in score.turns
        ):
            raise UsageError(
                f"reward part {name} gave {len(score.turns)} turn rewards to run {run.id}, which has"
                f" {len(run.turns)} turns; it must give one finite number a turn"
            )
        if score.value is None or not math.isclose(math.fsum(score.turns), score.value, abs_tol=1e-9):
            raise UsageError(
                f"reward part {name}: the turn rewards of run {run.id} do not add up to its score"
            )
    return score


def _between(name: str, run: Trajectory, value: object) -> float | None:
    given = read_number(value)
    if value is not None and not (given is not None and 0 <= given <= 1):
        shown = value if given is None else given
        raise UsageError(
            f"reward part {name} gave {shown!r:.80} to run {run.id}; a score lies between 0 and 1"
        )
    return given
