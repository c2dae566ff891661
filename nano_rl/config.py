"""What a training run is set to: frozen, few fields, and the defaults are the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from nano_rl.advantage import Baseline, Std
from nano_rl.aggregation import Aggregation
from nano_shared import ConfigError

KL = Literal["k1", "k2", "k3"]
Schedule = Literal["constant", "linear", "cosine"]
Normalise = Literal["sum", "each"]


class Config(BaseModel):
    """A frozen config that refuses unknown names and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ObjectiveConfig(Config):
    """What is maximised. Sources of the maths stand in `advantage.py` and `loss.py`."""

    baseline: Baseline = "mean"
    std: Std = "none"
    """division of the advantages by the group's deviation: n-1 (sample) or n (population)"""
    std_eps: float = Field(1e-4, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    """the ratio is clipped below 1 - clip_low"""
    clip_high: float = Field(0.2, gt=0)
    """the ratio is clipped above 1 + clip_high"""
    aggregation: Aggregation = "token"
    """what the loss is a mean over: all trained tokens, trajectories and then their tokens, or trajectories
    whose sums are divided by `constant_length`"""
    constant_length: int = Field(1024, ge=1)
    """tokens that constant aggregation divides each trajectory by"""
    tis_cap: float | None = Field(2.0, gt=0)
    """largest importance weight of a token; None ignores the difference between sampler and trainer"""
    beta: float = Field(0.0, ge=0)
    """weight of the KL to the reference; 0 needs no reference model"""
    kl: KL = "k3"
    normalise: Normalise = "sum"
    """the parts of a reward are summed and compared (sum), or each is compared and divided apart (each)"""
    discount: float | None = Field(None, ge=0, le=1)
    """of per-turn rewards, a turn: each turn is credited with its discounted return; None: with the reward"""

    @property
    def separable(self) -> bool:
        """Whether each token's loss depends on that token alone, so that any slice of tokens can be
        evaluated by itself."""
        return True

    @model_validator(mode="after")
    def _std_needs_baseline(self) -> ObjectiveConfig:
        if self.baseline == "none" and self.std != "none":
            raise ValueError("`std` needs a baseline: set baseline to mean or rloo, or std to none")
        if self.normalise == "each" and self.std == "none":
            raise ValueError(
                "`normalise` = each changes nothing where nothing is divided: set std to sample or population"
            )
        if self.discount is not None and (self.std != "none" or self.normalise == "each"):
            raise ValueError("`discount` goes with std = none and normalise = sum")
        return self


class RewardConfig(Config):
    """What a reward is made of. The parts and their settings stand in `nano_rl/rewards/`."""

    parts: dict[str, dict[str, JsonValue]] = {"tests": {"weight": 1.0}}
    """part -> its weight and settings; a bare number is its weight"""
    gate: float = Field(1.0, gt=0, le=1)
    """outcome from which shaping counts"""
    tie_break: float = Field(0.0, ge=0, lt=1)
    """below the gate: share of the smallest step between outcomes that shaping may move"""

    @field_validator("parts", mode="before")
    @classmethod
    def _weights(cls, parts: Any) -> Any:
        if not isinstance(parts, Mapping) or not parts:
            raise ValueError("name at least one part, for instance tests = 1")
        return {n: {"weight": s} if isinstance(s, int | float) else s for n, s in parts.items()}


class OptimizerConfig(Config):
    """AdamW and its learning rate."""

    learning_rate: float = Field(1e-5, gt=0)
    """peak, reached after the warm-up"""
    schedule: Schedule = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """largest norm of the gradient over all trained weights"""


class GuardConfig(Config):
    """When a run stops by itself."""

    mismatch_max: float = Field(1e-4, gt=0)
    """largest |log-prob of sampler - of trainer| of any fresh token, nats, where the weights are float32"""
    mismatch_mean: float = Field(0.02, gt=0)
    """largest mean of the same, nats, where the weights are bfloat16"""
    patience: int = Field(3, ge=1)
    """steps in a row without any signal before the run stops"""


class TrainConfig(Config):
    """One training with policy gradients."""

    steps: int = Field(40, ge=1)
    prompts_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=0)
    """fresh rollouts of each task; 0 trains on logs alone"""
    temperature: float = Field(1.0, gt=0)
    """of the sampler, and of the trainer's softmax; top-p and top-k are off in training"""
    max_tokens: int = Field(16384, ge=1)
    """positions of one micro-batch, padding included"""
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = Field(0, ge=0)
    save_every: int = Field(10, ge=1)
    """steps between saved states"""
    shuffle_rewards: bool = False
    """negative control: rewards are permuted over the step, so nothing can be learned"""
    reward: RewardConfig | None = None
    """None takes the grader's own rewards"""
    controls: float = Field(0.0, ge=0, le=0.5)
    """impossible rollouts for each ordinary one: hacking is measured on them, nothing is learned from them"""
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    guards: GuardConfig = GuardConfig()

    @field_validator("group_size")
    @classmethod
    def _comparable(cls, value: int) -> int:
        if value == 1:
            raise ValueError(
                "a group of 1 has nothing to be compared with, so every advantage would be 0;"
                " use at least 2 rollouts of each task"
            )
        return value

    @model_validator(mode="after")
    def _trainable(self) -> TrainConfig:
        if self.shuffle_rewards and self.objective.discount is not None:
            raise ValueError(
                "`shuffle_rewards` moves verdicts between rollouts of other lengths: no `discount`"
            )
        if self.objective.normalise == "each" and self.reward is None:
            raise ValueError("`normalise` = each needs a reward of several parts: give --reward")
        return self


class SftConfig(Config):
    """One training by imitation."""

    epochs: float = Field(1.0, gt=0)
    batch: int = Field(16, ge=1)
    """trajectories of one optimizer step"""
    stop_after: int | None = Field(None, ge=1)
    """steps after which to stop short of the schedule, which `epochs` alone sets"""
    max_tokens: int = Field(4096, ge=1)
    """positions of one micro-batch, padding included"""
    lora_rank: int = Field(16, ge=0)
    """0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the frozen weights under an adapter; trained weights are float32"""
    seed: int = Field(0, ge=0)
    save_every: int = Field(10, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_steps=10)


C = TypeVar("C", bound=Config)


def parse_config(kind: type[C], values: Mapping[str, Any]) -> C:
    """A config from plain values. Raises ConfigError with one line for each value that is wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        lines = [_line(e["loc"], e["msg"], e["input"], e["type"]) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _line(location: tuple[int | str, ...], message: str, value: object, kind: str) -> str:
    name = ".".join(str(part) for part in location)
    message = message.removeprefix("Value error, ")
    if kind == "missing":
        return f"{name}: is required"
    if kind == "extra_forbidden":
        return f"{name}: no such setting"
    return f"{name} = {value!r}: {message}" if name else message
