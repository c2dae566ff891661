"""What a training was asked to do: the command's arguments beside the config, to resume it and to report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nano_shared.errors import UsageError

RECORD = "training.json"
"""the file's name in the folder of a training"""
TOKENIZER = "tokenizer.json"
"""beside it: the policy's tokenizer, which a report shows sampled tokens with"""


class TrainingRecord(BaseModel):
    """One `nano-rl train`, as it was last started."""

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
    """path or URL without its password; fresh runs are written there"""
    more_logs: tuple[str, ...] = ()
    """further logs that --from-logs reads, in the same form"""
    limit: dict[str, int | float] = {}
    """what --limit said, by the names of `nano_shared.command_line`"""
    config: dict[str, Any]
    nano: str
    """version of the code"""
    started: float
    """unix seconds"""

    @property
    def reachable_log(self) -> str | None:
        """The log, where its address is enough to open it: a server's lacks the password."""
        return None if "://" in self.log else self.log

    @property
    def reachable_logs(self) -> tuple[str, ...]:
        """All logs, where their addresses are enough to open them; none otherwise:
        a server's lacks the password."""
        logs = (self.log, *self.more_logs)
        return () if any("://" in log for log in logs) else logs

    def write(self, folder: Path) -> None:
        scratch = folder / f"{RECORD}.new"
        scratch.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, folder / RECORD)


def read_record(folder: Path) -> TrainingRecord | None:
    """The record under `folder`; None where there is none. Raises UsageError for a file that is no record."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        return TrainingRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        raise UsageError(f"{path} is no record of a training: {first['loc']} {first['msg']}") from None
