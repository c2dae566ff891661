"""What happened to a training beside its steps: started, resumed, stopped by a guard, finished."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nano_rl.learn.metrics import read_rows

EVENTS = "events.jsonl"
"""the file's name in the folder of a training"""


class EventKind(StrEnum):
    STARTED = "started"
    RESUMED = "resumed"
    WORKER = "worker"
    """one that rolled out was lost and replaced"""
    GUARD = "guard"
    STOPPED = "stopped"
    FINISHED = "finished"


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    """unix seconds"""
    kind: EventKind
    step: int
    """steps done then"""
    text: str = ""


def note(folder: Path, kind: EventKind, step: int, text: str = "") -> None:
    """Append an event; what happened is never cut back, also when a training is resumed."""
    event = Event(time=time.time(), kind=kind, step=step, text=text)
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event.model_dump(mode="json")) + "\n")


def read_events(folder: Path) -> list[Event]:
    """All of them, in order; none where there is no such file."""
    path = folder / EVENTS
    return [Event.model_validate(row) for row in read_rows(path)] if path.exists() else []
