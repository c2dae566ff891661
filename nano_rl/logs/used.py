"""Which runs each step learned from: one JSON line a step, cut back to the state that training goes on from.

The log holds every run, also those of a step that was killed; those in here are in the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano_rl.group import Group
from nano_shared.durable import write_text
from nano_shared.errors import CheckpointError
from nano_shared.full_disk import full_disk_explained

USED = "used.jsonl"
"""the file's name in the folder of a training"""


class UsedRuns:
    """The lines of the steps before `step`; those of later steps, which were not finished, are dropped.

    Raises CheckpointError where the file lacks a step that the state has.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        lines = read_used(path)[:step] if path.exists() else []
        if [line["step"] for line in lines] != list(range(step)):
            raise CheckpointError(
                f"{path} does not hold the runs of the {step} steps that the saved state has learned from;"
                " put the file back, or start anew under another --name"
            )
        self._ids = [run for line in lines for group in line["groups"] for run in group["runs"]]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines), CheckpointError)

    @property
    def run_ids(self) -> list[str]:
        return list(self._ids)

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """One line, on disk when this returns. Raises CheckpointError where the disk is full."""
        told = [{"task": g.task_key, "runs": [t.id for t in g.trajectories]} for g in groups]
        with full_disk_explained(self._path, CheckpointError), self._path.open("a") as file:
            file.write(json.dumps({"step": step, "groups": told}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._ids += [run for group in told for run in group["runs"]]


def read_used(path: Path) -> list[dict[str, Any]]:
    """All complete lines, in order; a torn last one is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
