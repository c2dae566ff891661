"""What is maximised: a named objective fills what its paper names, every setting can be given by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nano_shared.errors import ConfigError
from nano_shared.extensions import find_extension

if TYPE_CHECKING:
    from torch import Tensor


class Config(BaseModel):
    """A frozen config that refuses unknown names and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Baseline = Literal["mean", "rloo", "none"]
Std = Literal["none", "sample", "population"]
Aggregation = Literal["token", "sequence", "constant"]
KL = Literal["k1", "k2", "k3", "k3+"]
Normalise = Literal["sum", "each"]
BaselineName = Literal["mean", "group", "rloo", "task", "level", "none"]


class Surrogate(Protocol):
    """The loss of each token, to be minimised, before importance weights, KL and entropy."""

    def __call__(
        self, new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
    ) -> Tensor:
        """[N] `new_N` and `ratio_N` carry gradient; on the first update the ratio is exactly 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Torch-free, so that a config can be read without it."""

    surrogate: Surrogate
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """settings that the paper names; they fill what is not set"""
    fixed: tuple[str, ...] = ()
    """settings without which it would be another objective"""
    unused: tuple[str, ...] = ()
    """settings that it never reads"""


def find_objective(name: str) -> Objective:
    """The objective of that name, or of `path.py:name`. Raises ConfigError for one that cannot be had."""
    return find_extension("nano.objectives", name, Objective)


class ObjectiveConfig(Config):
    """What is maximised. Sources of the maths stand in `advantage.py`, `loss.py` and `objectives/`."""

    objective: str = "recipe"
    """fills the settings that its paper names and that are not given; recipe leaves every setting free"""
    baseline: BaselineName = "mean"
    """what a reward is compared with: the group's mean (mean, or group), the mean of the others in it (rloo),
    the task's own mean over time (task), that of all tasks of its level (level), or nothing"""
    std: Std = "none"
    """division of the advantages by the group's deviation: n-1 (sample) or n (population)"""
    std_eps: float = Field(1e-4, gt=0)
    """added to that deviation"""
    clip_low: float = Field(0.2, gt=0, le=1)
    """the ratio is clipped below 1 - clip_low; 1 is no lower bound"""
    clip_high: float = Field(0.2, gt=0)
    """the ratio is clipped above 1 + clip_high"""
    dual_clip: float | None = Field(None, gt=1)
    """where the advantage is negative, the largest ratio that counts; None: any"""
    ratio: Literal["token", "sequence"] = "token"
    """new over old policy, of each token, or the geometric mean over each sequence"""
    aggregation: Aggregation = "token"
    """what the loss is a mean over: all trained tokens, trajectories and then their tokens, or trajectories
    whose sums are divided by `constant_length`"""
    constant_length: int = Field(1024, ge=1)
    """tokens that constant aggregation divides each trajectory by"""
    tis_cap: float | None = Field(2.0, gt=0)
    """largest importance weight; None ignores the difference between sampler and trainer"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """weights above the cap count as the cap, or as 0"""
    tis_floor: float = Field(0.0, ge=0)
    """with tis_mode = mask: weights below it count as 0 too"""
    tis_level: Literal["token", "sequence"] = "token"
    """an importance weight a token, or their product over each sequence"""
    reject_drift: float | None = Field(None, gt=0)
    """a sequence of negative mean advantage is left out whole where the policy has become less likely than
    the sampler to say it, by more than this, nats a token; None keeps all"""
    beta: float = Field(0.0, ge=0)
    """weight of the KL to the reference; 0 needs no reference model"""
    kl: KL = "k3"
    """its estimator; k3+ has the value of k3 and the gradient of k2, which is the right one in a loss"""
    kl_in: Literal["loss", "reward"] = "loss"
    """the KL is added to the loss, or taken from the reward of each token and all before it in its row"""
    entropy_bonus: float = Field(0.0, ge=0)
    """weight of the entropy, nats, that is taken from the loss"""
    overlong: Literal["train", "mask", "shape"] = "train"
    """rollouts cut off by a token budget: trained as they are, left out of loss and baseline, or all long
    rollouts lose reward by their length"""
    overlong_limit: int | None = Field(None, ge=1)
    """with overlong = shape: sampled tokens from which a rollout loses a whole point"""
    overlong_buffer: int | None = Field(None, ge=1)
    """with overlong = shape: tokens below the limit over which the loss grows from nothing"""
    dead_groups: Literal["drop", "keep"] = "drop"
    """groups without a signal leave the step, or stay in its denominator and under its KL"""
    max_staleness: int | None = Field(None, ge=0)
    """policy versions that a token may be behind; older tokens are left out of the loss. None: any"""
    normalise: Normalise = "sum"
    """the parts of a reward are summed and compared (sum), or each is compared and divided apart (each)"""
    discount: float | None = Field(None, ge=0, le=1)
    """of per-turn rewards, a turn: each turn is credited with its discounted return; None: with the reward"""

    @property
    def separable(self) -> bool:
        """Whether each token's loss depends on that token alone, so that any slice of tokens can be
        evaluated by itself."""
        return (
            self.ratio == "token"
            and (self.tis_cap is None or self.tis_level == "token")
            and self.reject_drift is None
            and not (self.beta > 0 and self.kl_in == "reward")
        )

    @property
    def over_time(self) -> bool:
        """Whether rewards are compared with what other steps earned (`baselines.py`)."""
        return self.baseline in ("task", "level")

    @property
    def within_group(self) -> Baseline:
        """The baseline as far as a group alone gives it."""
        return self.baseline if self.baseline in ("rloo", "none") else "mean"  # type: ignore[return-value]

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("baseline") == "group":
            values = {**values, "baseline": "mean"}
        name = values.get("objective", "recipe") if isinstance(values, Mapping) else None
        if not isinstance(name, str):
            return values
        try:
            defaults = dict(find_objective(name).defaults)
        except ConfigError as problem:
            raise ValueError(str(problem)) from None
        if values.get("aggregation", "constant") != "constant":
            defaults.pop("constant_length", None)
        return {**defaults, **values}

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveConfig:
        found = self._other_objective(), self._advantages(), self._kl(), self._weights(), self._overlong()
        for problem in found:
            if problem:
                raise ValueError(problem)
        return self

    def _other_objective(self) -> str | None:
        preset = find_objective(self.objective)
        for name in (*preset.fixed, *preset.unused):
            default = type(self).model_fields[name].default
            meant, given = preset.defaults.get(name, default), getattr(self, name)
            if given == meant:
                continue
            if name in preset.unused:
                return f"objective = {self.objective} reads no `{name}`: leave it out"
            return (
                f"objective = {self.objective} means {name} = {meant}, not {given}: leave `{name}` out, or"
                " take objective = recipe, where every setting is free"
            )
        return None

    def _advantages(self) -> str | None:
        if self.baseline == "none" and self.std != "none":
            return "`std` needs a baseline: set baseline to mean or rloo, or std to none"
        if self.over_time and (self.std != "none" or self.normalise == "each" or self.discount is not None):
            return (
                f"baseline = {self.baseline} compares whole rewards with those of other steps: set std to"
                " none, normalise to sum, and leave `discount` out"
            )
        if self.over_time and self.objective == "ppo":
            return f"baseline = {self.baseline}: objective = ppo has a critic to compare with; leave it out"
        if self.normalise == "each" and self.std == "none":
            return (
                "`normalise` = each changes nothing where nothing is divided: set std to sample or population"
            )
        if self.discount is not None and (self.std != "none" or self.normalise == "each"):
            return "`discount` goes with std = none and normalise = sum"
        if self.discount is not None and self.objective == "ppo":
            return "`discount` credits turns without a critic: leave it out with objective = ppo"
        if self.aggregation != "constant" and self.constant_length != 1024:
            return "`constant_length` is read by aggregation = constant alone: set that, or leave it out"
        return None

    def _kl(self) -> str | None:
        usual = find_objective(self.objective).defaults
        if self.beta == 0 and (self.kl, self.kl_in) != (usual.get("kl", "k3"), usual.get("kl_in", "loss")):
            return "`kl` and `kl_in` are read where beta is above 0 alone: give beta, or leave them out"
        if self.kl_in == "reward" and self.kl == "k3+":
            return "`kl` = k3+ differs from k3 in its gradient, and a reward has none: take k1 in the reward"
        return None

    def _weights(self) -> str | None:
        if self.tis_cap is None and (self.tis_mode, self.tis_level) != ("truncate", "token"):
            return "`tis_mode` and `tis_level` need importance weights: set tis_cap"
        if self.tis_floor > 0 and self.tis_mode != "mask":
            return "`tis_floor` masks weights below it: set tis_mode to mask"
        if self.tis_cap is not None and self.tis_floor >= self.tis_cap:
            return f"tis_floor = {self.tis_floor:g} leaves nothing below tis_cap = {self.tis_cap:g}"
        return None

    def _overlong(self) -> str | None:
        limit, buffer = self.overlong_limit, self.overlong_buffer
        if self.overlong != "shape":
            if limit is None and buffer is None:
                return None
            return "`overlong_limit` and `overlong_buffer` are read by overlong = shape alone"
        if limit is None or buffer is None:
            return "overlong = shape needs overlong_limit and overlong_buffer, in tokens"
        if buffer > limit:
            return f"overlong_buffer = {buffer} is longer than overlong_limit = {limit}"
        return None
