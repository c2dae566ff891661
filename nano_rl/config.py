"""What a training is made of; every field is a flag and a key of the config file."""

from __future__ import annotations

from typing import Literal, Self

from nano_shared.errors import ConfigError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def checked(cls, **values: object) -> Self:
        """Validated settings. Raises ConfigError naming the setting and its value; None leaves the default."""
        given = {key: value for key, value in values.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as problem:
            error = problem.errors()[0]
            key = ".".join(str(part) for part in error["loc"])
            shown = f"--{key.replace('_', '-')} = {error['input']!r}: " if key else ""
            raise ConfigError(shown + error["msg"].removeprefix("Value error, ").lower()) from None


class ObjectiveConfig(_Config):
    """GRPO with mean-only advantages and a global token mean: the vetted recipe."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    tis_cap: float = Field(2.0, gt=0)
    """cap of the importance weight (trainer over behaviour policy) of a logged token"""
    beta: float = Field(0.0, ge=0)
    """weight of the KL to the starting policy; 0 keeps no reference model"""
    kl: Literal["k1", "k2", "k3"] = "k3"
    std: Literal["none", "sample", "population"] = "none"
    """advantages divided by the group's standard deviation, or not"""


class TrainConfig(_Config):
    """One training with policy gradients."""

    steps: int = Field(40, ge=1)
    prompts: int = Field(8, ge=1)
    """tasks a step"""
    group_size: int = Field(8, ge=0)
    """fresh rollouts a task; 0 trains on logs alone"""
    learning_rate: float = Field(1e-4, gt=0)
    warmup: int = Field(2, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    lora: int = Field(0, ge=0)
    """rank of the adapter; 0 trains every weight"""
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(16384, ge=64)
    """padded tokens a micro-batch"""
    seed: int = 0
    save_every: int = Field(10, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _a_group_compares(self) -> Self:
        if self.group_size == 1:
            raise ValueError("a group of one has nothing to compare with; give --group-size 2 or more")
        return self


class SftConfig(_Config):
    """One training by imitation."""

    epochs: float = Field(1.0, gt=0)
    batch: int = Field(16, ge=1)
    """trajectories an optimizer step"""
    learning_rate: float = Field(5e-4, gt=0)
    warmup: int = Field(10, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    lora: int = Field(16, ge=0)
    max_tokens: int = Field(4096, ge=64)
    seed: int = 0
    save_every: int = Field(20, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
