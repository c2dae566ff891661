"""The record of a training in its folder: the command and config, events, and the rollouts of each step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nano_rl.learn.metrics import RowWriter, read_rows
from nano_rl.learn.rows.group import Group
from nano_rl.rewards import outcome
from nano_shared.errors import UsageError
from nano_shared.types import Trajectory

ROLLOUTS = "rollouts.jsonl"
"""the file's name in the folder of a training"""


class Rollout(BaseModel):
    """The fields of a rollout that reports use; the run itself is in the log."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    """run id in the log"""
    level: int | None = None
    family: str | None = None
    reward: float | None = None
    outcome: float | None = None
    """reward of the tests alone"""
    tampered: bool = False
    control: bool = False
    """an impossible control, which is never trained on"""

    @property
    def success(self) -> bool | None:
        return None if self.outcome is None else self.outcome >= 1


class RolloutsWriter:
    """Appends the rollouts of each step; rows of that and later steps from a killed process are dropped."""

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
    """Step -> its rollouts, in order; empty without a file."""
    rows = read_rows(path) if path.exists() else []
    return {int(row["step"]): [Rollout.model_validate(run) for run in row["runs"]] for row in rows}


def _rollout(run: Trajectory) -> dict[str, Any]:
    rollout = Rollout(
        id=run.id,
        level=run.task.level,
        family=run.task.family,
        reward=run.reward,
        outcome=outcome(run.verdict),
        tampered=bool(run.verdict and run.verdict.tampering),
    )
    return rollout.model_dump(mode="json", exclude_defaults=True)


EVENTS = "events.jsonl"
"""the file's name in the folder of a training"""


class EventKind(StrEnum):
    STARTED = "started"
    RESUMED = "resumed"
    WORKER = "worker"
    """a rollout worker was lost and replaced, or a server left out or taken back"""
    GUARD = "guard"
    STOPPED = "stopped"
    FINISHED = "finished"


class TrainingEvent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    """unix seconds"""
    kind: EventKind
    step: int
    """steps done then"""
    text: str = ""


def note(folder: Path, kind: EventKind, step: int, text: str = "") -> None:
    """Append an event; events are kept when a training is resumed."""
    event = TrainingEvent(time=time.time(), kind=kind, step=step, text=text)
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event.model_dump(mode="json")) + "\n")


def read_events(folder: Path) -> list[TrainingEvent]:
    """All events in order; empty without a file."""
    path = folder / EVENTS
    return [TrainingEvent.model_validate(row) for row in read_rows(path)] if path.exists() else []


RECORD = "training.json"
"""the file's name in the folder of a training"""
TOKENIZER = "tokenizer.json"
"""file name of the policy's tokenizer, with which a report decodes sampled tokens"""


class TrainingRecord(BaseModel):
    """The arguments and config of a training, as it was last started."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    model: str
    """as the user named it, or the default's name"""
    tasks: str | None = None
    """file of tasks, absolute"""
    held_out: str | None = None
    """file of held-out tasks, absolute"""
    from_logs: bool = False
    fresh: int = 0
    curriculum: bool = False
    log: str
    """path or URL without password of the log that fresh runs are written to"""
    more_logs: tuple[str, ...] = ()
    """further logs that --from-logs reads, in the same form"""
    limit: dict[str, int | float | str] = {}
    """what --limit and --net said, by the names of the settings"""
    tools: tuple[str, ...] = ()
    """what --tool said"""
    envs: tuple[str, ...] = ()
    """what --env said, with absolute paths"""
    agent: str | None = None
    """what --agent said"""
    agent_folders: tuple[str, ...] = ()
    config: dict[str, Any]
    nano: str
    """version of the code"""
    started: float
    """unix seconds"""

    @property
    def reachable_log(self) -> str | None:
        """The log if its address suffices to open it; None for a server, whose password is not recorded."""
        return None if "://" in self.log else self.log

    @property
    def reachable_logs(self) -> tuple[str, ...]:
        """All logs if their addresses suffice to open them, else none."""
        logs = (self.log, *self.more_logs)
        return () if any("://" in log for log in logs) else logs

    def write(self, folder: Path) -> None:
        scratch = folder / f"{RECORD}.new"
        scratch.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, folder / RECORD)


def read_record(folder: Path) -> TrainingRecord | None:
    """The record in `folder`; None if there is none. Raises UsageError for an invalid file."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        return TrainingRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        raise UsageError(f"{path} is no record of a training: {first['loc']} {first['msg']}") from None
