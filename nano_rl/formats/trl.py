"""TRL datasets: a `prompt` of messages, and columns that reach the environment's `reset` as they are."""

from __future__ import annotations

from nano_rl.formats.row_format import RowFormat
from nano_rl.formats.verifiers import messages_text
from nano_rl.tasks.jsonl import Row
from nano_shared.hashing import content_hash
from nano_shared.refusal import Refused
from nano_shared.types import Provenance, Task

NAME = "trl"


def read_row(row: Row) -> Task:
    """A prompt without a check: TRL's reward functions are code, which no row carries."""
    if "prompt" not in row:
        raise Refused("prompt", "is missing")
    key = f"{NAME}/{content_hash(row).removeprefix('sha256:')[:16]}"
    return Task(key=key, prompt=messages_text(row["prompt"], "prompt"), provenance=Provenance(source=NAME))


def write_row(task: Task) -> Row:
    """For `GRPOTrainer(environment_factory=environment_factory())`, which finds the task in `nano_task`."""
    return {"prompt": [{"role": "user", "content": task.prompt}], "task_key": task.key}


TRL = RowFormat(
    name=NAME,
    summary="TRL datasets for the environment class nano_rl.formats.trl_environment",
    recognises=lambda row: "prompt" in row,
    read_row=read_row,
    write_row=write_row,
    understood=frozenset({"prompt", "task_key"}),
)
