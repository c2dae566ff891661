"""The state of a training's Ray workers, in a file beside its metrics, for `nano-rl cluster status`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import Field, ValidationError

from nano_shared.errors import CheckpointError
from nano_shared.files import write_text
from nano_shared.types import Value

WORKERS = "workers.json"
"""the file's name in the folder of a training; it is there while the training runs"""
STALE_SECONDS = 30.0


class WorkerStatus(Value):
    number: int
    host: str
    pid: int
    opened: bool
    """False while it starts"""
    running: int
    """runs under way"""
    done: int
    current: bool
    """it samples from the newest version"""
    idle: float
    """share of its time without a run"""
    silent_seconds: float
    memory_mb: float
    """resident"""


class LostWorker(Value):
    number: int
    host: str
    pid: int
    why: str
    time: float = Field(default_factory=time.time)
    """unix seconds"""


class ClusterStatus(Value):
    cluster: str
    """as --ray named it"""
    workers: tuple[WorkerStatus, ...]
    lost: tuple[LostWorker, ...]
    """the last ones that were replaced"""
    replaced: int
    queued: int
    """runs that wait for a worker"""
    done: int
    repeated: int
    """runs that were given to a second worker"""
    version: int | None
    """policy version that is sampled from"""
    trainer: int = Field(default_factory=os.getpid)
    """process id"""
    written: float = Field(default_factory=time.time)
    """unix seconds"""

    @property
    def is_stale(self) -> bool:
        """True if the trainer has ended without removing the file, or hangs."""
        return time.time() - self.written > STALE_SECONDS

    def write(self, path: Path) -> None:
        write_text(path, self.model_dump_json() + "\n", CheckpointError)


def read_status(folder: Path) -> ClusterStatus | None:
    """Of the training in a folder; None if it has no workers now."""
    try:
        return ClusterStatus.model_validate_json((folder / WORKERS).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as problem:
        raise CheckpointError(f"{folder / WORKERS} is damaged: {problem.error_count()} errors") from None
