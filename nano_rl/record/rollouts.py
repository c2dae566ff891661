"""Which rollouts each step had: a JSON line a step, for whoever looks at a training later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from nano_rl.learn.metrics import RowWriter, read_rows
from nano_rl.learn.rows.group import Group
from nano_rl.rewards import outcome
from nano_shared.types import Trajectory

ROLLOUTS = "rollouts.jsonl"
"""the file's name in the folder of a training"""


class Rollout(BaseModel):
    """What a page of many rollouts needs of one; all else is in the log."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    """run id in the log"""
    level: int | None = None
    family: str | None = None
    reward: float | None = None
    outcome: float | None = None
    """of the tests alone"""
    tampered: bool = False
    control: bool = False
    """an impossible one, from which nothing was learned"""

    @property
    def success(self) -> bool | None:
        return None if self.outcome is None else self.outcome >= 1


class RolloutsWriter:
    """Appends the rollouts of each step; the first step written cuts back what a killed process left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: RowWriter | None = None

    def write(self, step: int, groups: Sequence[Group], controls: Sequence[Trajectory] = ()) -> None:
        self._writer = self._writer or RowWriter(self._path, resume_at=step)
        runs = [_rollout(run) for group in groups for run in group.trajectories]
        runs += [_rollout(run) | {"control": True} for run in controls]
        self._writer.write_row({"step": step, "runs": runs})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_rollouts(path: Path) -> dict[int, list[Rollout]]:
    """Step -> its rollouts, in order; empty where there is no such file."""
    rows = read_rows(path) if path.exists() else []
    return {int(row["step"]): [Rollout.model_validate(run) for run in row["runs"]] for row in rows}


def _rollout(run: Trajectory) -> dict[str, Any]:
    told = Rollout(
        id=run.id,
        level=run.task.level,
        family=run.task.family,
        reward=run.reward,
        outcome=outcome(run.verdict),
        tampered=bool(run.verdict and run.verdict.tampering),
    )
    return told.model_dump(mode="json", exclude_defaults=True)
