"""Settings of learning: objective, optimizer, critic, guards, use of logged runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nano_shared.errors import ConfigError
from nano_shared.extensions import find_extension, takes

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.objectives.controls import Control


class Config(BaseModel):
    """Base of all configs: frozen, with no unknown names and no infinite or NaN numbers."""

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
        """[N] loss of each token. `new_N` and `ratio_N` have a gradient; on the first update the ratio is
        1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective: its surrogate loss, and the settings that its paper names."""

    surrogate: Surrogate
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """settings of the paper, used where the config sets none"""
    fixed: tuple[str, ...] = ()
    """settings that may not differ from the defaults"""
    unused: tuple[str, ...] = ()
    """settings that the objective does not use"""
    controls: tuple[Control, ...] = ()
    """what changes from step to step"""


def find_objective(name: str) -> Objective:
    """The objective of that name, or of `path.py:name`. Raises ConfigError if it cannot be loaded."""
    # asked for at every micro-batch; what the name of a file stands for depends on the working directory
    return _open_objective(name) if ":" in name else _installed_objective(name)


def _open_objective(name: str) -> Objective:
    return find_extension("nano.objectives", name, Objective, check=_problem)


_installed_objective = cache(_open_objective)


def _problem(objective: Objective) -> str | None:
    settings = ObjectiveConfig.model_fields
    for name in (*objective.defaults, *objective.fixed, *objective.unused):
        if name not in settings:
            return f"names the setting {name!r}, which does not exist; settings: {', '.join(settings)}"
    wrong = takes(objective.surrogate, "new_N", "ratio_N", "advantages_N", "config")
    return f"has a surrogate that {wrong}" if wrong else None


class ObjectiveConfig(Config):
    """The objective of a training. Formulas and papers are in `advantage.py`, `gae.py` and `objectives/`."""

    objective: str = "recipe"
    """sets the defaults of the settings that its paper names; recipe leaves every setting free"""
    baseline: BaselineName = "mean"
    """subtracted from each reward: the mean of the group (mean, or group), the mean of the other rollouts in
    it (rloo), the running mean of the task (task) or of its level (level), or nothing (none)"""
    std: Std = "none"
    """divide advantages by the group's standard deviation, with n-1 (sample) or n (population)"""
    std_eps: float = Field(1e-4, gt=0)
    """added to that standard deviation"""
    clip_low: float = Field(0.2, gt=0, le=1)
    """the ratio is clipped at 1 - clip_low from below; 1 means no lower bound"""
    clip_high: float = Field(0.2, gt=0)
    """the ratio is clipped at 1 + clip_high from above"""
    dual_clip: float | None = Field(None, gt=1)
    """upper bound of the ratio for negative advantages; None: no bound"""
    ratio: Literal["token", "sequence"] = "token"
    """probability ratio of new to old policy: per token, or the geometric mean over each sequence"""
    aggregation: Aggregation = "token"
    """the loss is a mean over all trained tokens (token), over trajectories of the mean over their tokens
    (sequence), or over trajectories of the sum over their tokens / `constant_length` (constant)"""
    constant_length: int = Field(1024, ge=1)
    """tokens by which aggregation = constant divides the sum of each trajectory"""
    tis_cap: float | None = Field(2.0, gt=0)
    """cap of the importance weight p(trainer) / p(sampler); None: no importance weights"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """importance weights above the cap are set to the cap (truncate) or to 0 (mask)"""
    tis_floor: float = Field(0.0, ge=0)
    """with tis_mode = mask: weights below this are set to 0 too"""
    tis_level: Literal["token", "sequence"] = "token"
    """importance weights per token, or their product over each sequence"""
    reject_drift: float | None = Field(None, gt=0)
    """leave out sequences with a negative mean advantage whose mean log-prob under the policy is lower than
    under the sampler by more than this, nats per token; None keeps all"""
    beta: float = Field(0.0, ge=0)
    """weight of the KL to the reference model; 0: no reference"""
    kl: KL = "k3"
    """estimator of the KL; k3+ has the value of k3 and the gradient of k2, which is unbiased in a loss"""
    kl_in: Literal["loss", "reward"] = "loss"
    """add the KL to the loss, or subtract it from the reward of its token and of all earlier ones in the
    row"""
    entropy_bonus: float = Field(0.0, ge=0)
    """weight of the entropy, nats, which is subtracted from the loss"""
    overlong: Literal["train", "mask", "shape"] = "train"
    """rollouts cut off by a token budget: train on them (train), leave them out of loss and baseline (mask),
    or reduce the reward of all long rollouts by their length (shape)"""
    overlong_limit: int | None = Field(None, ge=1)
    """with overlong = shape: sampled tokens from which the penalty is 1"""
    overlong_buffer: int | None = Field(None, ge=1)
    """with overlong = shape: tokens below the limit over which the penalty rises from 0 to 1"""
    dead_groups: Literal["drop", "keep"] = "drop"
    """groups without a signal: left out of the step, or kept in its denominator and its KL"""
    max_staleness: int | None = Field(None, ge=0)
    """largest number of policy updates since a token was sampled; older tokens are left out of the loss,
    and none is older with `asynchronous`. None: any"""
    normalise: Normalise = "sum"
    """sum the parts of a reward before the advantage (sum), or normalise each part separately (each)"""
    discount: float | None = Field(None, ge=0, le=1)
    """discount per turn: credit each turn with its discounted return; None: with the reward of the rollout"""

    @property
    def separable(self) -> bool:
        """True if the loss of each token depends on that token alone, so that slices of tokens can be
        evaluated separately."""
        return (
            self.ratio == "token"
            and (self.tis_cap is None or self.tis_level == "token")
            and self.reject_drift is None
            and not (self.beta > 0 and self.kl_in == "reward")
        )

    @property
    def over_time(self) -> bool:
        """True if the baseline is a running mean over steps (`RunningBaselines`)."""
        return self.baseline in ("task", "level")

    @property
    def within_group(self) -> Baseline:
        """The baseline within a group: mean, rloo or none."""
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


Quantise = Literal["4bit", "8bit"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(Config):
    """AdamW and its learning rate."""

    learning_rate: float = Field(1e-5, gt=0)
    """peak, reached after the warm-up"""
    schedule: LearningRateSchedule = "constant"
    """learning rate after the warm-up: constant, or decaying to 0 linearly or along half a cosine"""
    warmup_steps: int = Field(0, ge=0)
    """steps over which the learning rate rises to its peak"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay of AdamW, for matrices alone"""
    grad_clip: float = Field(1.0, gt=0)
    """largest norm of the gradient of all trained weights; larger ones are scaled down"""
    states: Literal["float32", "8bit"] = "float32"
    """the two moments of each weight: 8 bytes, or 2 in blocks of 256 with a scale (8bit, by bitsandbytes)"""


class OfflineConfig(Config):
    """Settings of a training over a fixed set of rows: imitation, DPO, reward models."""

    epochs: float = Field(1.0, gt=0)
    """passes over the rows"""
    batch: int = Field(16, ge=1)
    """rows (trajectories or pairs) of one optimizer step"""
    max_tokens: int = Field(8192, ge=1)
    """positions of one micro-batch, padding included"""
    lora_rank: int = Field(16, ge=0)
    """rank of the adapter that is trained; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; trained weights have a float32 master copy, which is updated"""
    seed: int = Field(0, ge=0)
    """seed of the order of rows and of a new adapter"""
    save_every: int = Field(10, ge=1)
    """steps between saved states"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_steps=5)


class GuardConfig(Config):
    """Bounds at which a training stops by itself."""

    mismatch_max: float = Field(1e-4, gt=0)
    """float32 weights: largest |log-prob of sampler - of trainer| of any fresh token, nats; for a log-prob
    below -1 divided by it"""
    mismatch_mean: float = Field(0.05, gt=0)
    """bfloat16 weights: largest mean of that difference"""
    patience: int = Field(3, ge=1)
    """number of steps in a row without any signal, all cut off, or collapsed, after which training stops"""
    entropy_min: float = Field(1e-3, ge=0)
    """mean entropy of the trained tokens, nats, below which the policy counts as collapsed; 0: never"""
    shift_max: float = Field(5.0, gt=0)
    """largest mean |change| of a row's log-probs by one update, nats; a larger one means divergence"""


class CriticConfig(Config):
    """The critic of PPO, which gives advantages by generalised advantage estimation (GAE)."""

    gae_lambda: float = Field(1.0, ge=0, le=1)
    """lambda of GAE, per sampled token: 1 uses the returns alone, 0 the critic's next value; below 1 the
    critic must be better than it becomes in tens of steps"""
    discount: float = Field(1.0, gt=0, le=1)
    """discount of later rewards, per sampled token"""
    value_clip: float | None = Field(0.2, gt=0)
    """clip the change of each value in a step to this; None: no clipping"""
    whiten: bool = True
    """normalise advantages to mean 0 and standard deviation 1 over the sampled tokens of a step"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    """optimizer of the critic, which is a separate network"""


class LogsConfig(Config):
    """Use of logged runs by --from-logs; without effect on other trainings."""

    mix: float = Field(0.5, gt=0, le=1)
    """largest share of logged runs in a group that is topped up with fresh rollouts; when the logged runs of
    a task are used up, it continues with fresh ones alone"""
    uses: int | None = Field(1, ge=1)
    """how often a logged run may be trained on, by this policy and its ancestors together. None: any"""
    min_ess: float = Field(0.5, ge=0, le=1)
    """smallest effective sample size of the logged tokens of a step, as a share of them; the runs with the
    largest drift are dropped until it is reached; 0 keeps all"""
    max_drift: float | None = Field(0.5, gt=0)
    """drop stale runs whose mean |log importance weight| per token exceeds this, nats. None: any"""
    unknown_age: Literal["refuse", "admit"] = "refuse"
    """logged runs of policies that are no ancestors of this one"""
    largest_group: int = Field(16, ge=2)
    """without fresh rollouts: largest number of logged runs of a task in one step"""
    mutants: int = Field(32, ge=0)
    """with fresh rollouts: further tasks, each the workspace that a passing logged run left with one line
    changed so that the run's check fails; 0 for none"""
    lambda_preference: float = Field(0.0, ge=0)
    """weight of the preference loss on outcomes that policy gradients may not use"""
    preference_beta: float = Field(0.1, gt=0)
    """strength of that loss's KL constraint to the initial policy (plugins/preferences/README.md)"""


class UpdateConfig(Config):
    """The settings that the updates of a training use."""

    steps: int = Field(40, ge=1)
    """number of steps; each gathers groups and learns from them"""
    max_tokens: int = Field(4096, ge=1)
    """tokens of one micro-batch, shared prefixes counted once (padded positions if they cannot be shared)"""
    lora_rank: int = Field(0, ge=0)
    """rank of the LoRA adapter that is trained; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; trained weights have a float32 master copy, which is updated"""
    gradient_checkpointing: bool = False
    """keep one state a layer and token for the backward pass and compute the rest again: a fraction of the
    memory of activations, for a third more time"""
    quantise: Quantise | None = None
    """load the base of a LoRA adapter in 4 or 8 bits (bitsandbytes)"""
    seed: int = Field(0, ge=0)
    """seed of tasks, rollouts and adapters: the same seed repeats a training"""
    shuffle_rewards: bool = False
    """negative control: permute the rewards of a step, so that nothing can be learned"""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    guards: GuardConfig = GuardConfig()
    updates_per_step: int = Field(1, ge=1)
    """passes over the rollouts of a step; the ratio is to the weights before the first pass"""
    minibatches: int = Field(1, ge=1)
    """parts of each pass, made of whole groups, with one update each"""
    critic: CriticConfig = CriticConfig()
    """critic of objective = ppo"""
    logs: LogsConfig = LogsConfig()
