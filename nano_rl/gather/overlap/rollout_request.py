"""What the trainer tells the process that rolls out for it (`rollout_worker.py`): once, and for each step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from nano_shared.types import Sampling, Task, Value

OPENING = "opening.json"
"""name of the file with the opening, in the folder that both share"""


class Opening(Value):
    """What stays as it is for a whole training."""

    trainer: int
    """process id of the trainer, without which the worker has nothing to live for"""
    model: str
    """name of the weights that the training began from, as `open_weights` takes it"""
    model_id: str
    """their content hash, which is logged with each turn"""
    dtype: Literal["float32", "bfloat16"]
    lora_rank: int
    seed: int
    profile: str
    """of the weights"""
    runtime_profile: str
    scheduler: Literal["lockstep", "free"]
    log: str
    """as `LogStore.open` takes it, with its password"""
    blobs: str
    policy_name: str
    limits: dict[str, JsonValue] = Field({})
    """in place of the tasks' own"""


class ProbeRow(Value):
    """Ids of a row, of which those from `first` on are scored at a temperature."""

    ids: tuple[int, ...]
    first: int
    temperature: float


class RolloutRequest(Value):
    """The rollouts of one step, or of one round of its refill."""

    version: int
    weights: str
    """file of the trained weights of that version"""
    seed: int
    sampling: Sampling
    tasks: tuple[Task, ...]
    sizes: tuple[int, ...] = Field(min_length=1)
    """rollouts of each task"""
    probe: ProbeRow | None = None
    """a row that what samples has to score, so that it shows which weights it has"""
