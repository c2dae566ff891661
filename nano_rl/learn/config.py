"""Settings of learning: objective, optimizer, guards, use of logged runs. Imports no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nano_shared.errors import ConfigError
from nano_shared.extensions import find_extension, takes


class Config(BaseModel):
    """Base of all configs: frozen, with no unknown names and no infinite or NaN numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


Baseline = Literal["mean", "rloo", "none"]
Std = Literal["none", "sample", "population"]
Aggregation = Literal["token", "sequence", "constant"]
KL = Literal["k1", "k2", "k3", "k3+"]


class Objective(Config):
    """An objective: its surrogate loss, and the terms around it that its paper names. Those of papers are in
    `objectives.py`; a file of yours can hold another, `--objective ./mine.py:MINE`. Formulas are in `loss.py`
    and `rows.py`."""

    surrogate: Callable[..., Any]
    """(new_N, ratio_N, advantages_N, config) -> [N] loss of each token, to be minimised, before importance
    weights, KL and entropy; `config` are these terms; `new_N` and `ratio_N` have a gradient; on the first
    update the ratio is 1. A fifth argument `reference_N` gets the log-probs of the reference model. It may
    return (loss_N, metrics) instead: name -> [N] or number, whose mean is the metric `objective_NAME`"""
    advantage: Callable[..., Any] | None = None
    """(rewards_G, runs_G) of the scored rollouts of a group -> [G] an advantage, or one for each turn; None:
    by `baseline` and `std`"""
    critic: bool = False
    """advantages come from a critic, one a token, and not from the group"""
    baseline: Baseline = "mean"
    """subtracted from each reward: the mean of the group, that of its other rollouts (rloo), or nothing"""
    std: Std = "none"
    """divide advantages by the group's standard deviation, with n-1 (sample) or n (population)"""
    clips: bool = True
    """the surrogate reads clip_low and clip_high"""
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
    overlong_limit: int = Field(1024, ge=1)
    """with overlong = shape: sampled tokens from which the penalty is 1"""
    overlong_buffer: int = Field(256, ge=1)
    """with overlong = shape: tokens below the limit over which the penalty rises from 0 to 1"""
    dead_groups: Literal["drop", "keep"] = "drop"
    """groups without a signal: left out of the step, or kept in its denominator and its KL"""
    normalise: Literal["sum", "each"] = "sum"
    """sum the parts of a reward before the advantage (sum), or normalise each part separately (each)"""
    discount: float | None = Field(None, ge=0, le=1)
    """discount per turn: credit each turn with its discounted return; None: with the reward of the rollout"""

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0 or self.reads_reference

    @property
    def reads_reference(self) -> bool:
        """Whether the surrogate takes log-probs of the reference model."""
        return "reference_N" in inspect.signature(self.surrogate).parameters

    def with_terms(self, **terms: Any) -> Objective:
        """The objective with other terms. Raises ValidationError for values that cannot be."""
        return Objective(**{**dict(self), **terms})


_WITH_ADVANTAGE = re.compile(r"(.*?\.py:\w+|[\w.:-]+)\+(.+)")


def find_objective(name: str) -> Objective:
    """The objective of that name, or of `path.py:name`; NAME+ADVANTAGE is one with that advantage. Raises
    ConfigError if it cannot be loaded."""
    # asked for at every micro-batch; what the name of a file stands for depends on the working directory
    return _open_objective(name) if ":" in name else _installed_objective(name)


def _open_objective(name: str) -> Objective:
    both = _WITH_ADVANTAGE.fullmatch(name)
    found = find_extension("nano.objectives", both[1] if both else name, Objective, check=_problem)
    if both is None:
        return found
    advantage: Any = find_extension("nano.advantages", both[2], check=_misfit)
    if problem := _problem(found := found.with_terms(advantage=advantage)):
        raise ConfigError(f"{name} {problem}")
    return found


_installed_objective = cache(_open_objective)


def _problem(objective: Objective) -> str | None:
    further = ("reference_N",) if objective.reads_reference else ()
    if wrong := takes(objective.surrogate, "new_N", "ratio_N", "advantages_N", "config", *further):
        return f"has a surrogate that {wrong}"
    if objective.advantage is None:
        return None
    if objective.critic or objective.discount is not None or objective.normalise == "each":
        return "has an advantage, which takes the place of a critic, of `discount` and of `normalise` = each"
    return f"has an advantage that {wrong}" if (wrong := _misfit(objective.advantage)) else None


def _misfit(advantage: object) -> str | None:
    return takes(advantage, "rewards_G", "runs_G")


class ObjectiveConfig(Config):
    """The objective of a training, and what is set over its terms."""

    objective: str = "recipe"
    """by the name of its paper, or FILE.py:NAME; with +NAME or +FILE.py:NAME another advantage. The other
    settings are its own where they are not given"""
    clip_low: float = Field(0.2, gt=0, le=1)
    """the ratio is clipped at 1 - clip_low from below; 1 means no lower bound"""
    clip_high: float = Field(0.2, gt=0)
    """the ratio is clipped at 1 + clip_high from above"""
    beta: float = Field(0.0, ge=0)
    """weight of the KL to the reference model; 0: no reference"""
    max_staleness: int | None = Field(None, ge=0)
    """largest number of policy updates since a token was sampled; older tokens are left out of the loss,
    and none is older with `asynchronous`. None: any"""

    @property
    def terms(self) -> Objective:
        return find_objective(self.objective).model_copy(update={n: getattr(self, n) for n in _OVER})

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        name = values.get("objective", "recipe") if isinstance(values, Mapping) else None
        if not isinstance(name, str):
            return values
        try:
            objective = find_objective(name)
        except ConfigError as problem:
            raise ValueError(str(problem)) from None
        return {**{setting: getattr(objective, setting) for setting in _OVER}, **values}

    @model_validator(mode="after")
    def _clips(self) -> ObjectiveConfig:
        objective = find_objective(self.objective)
        for name in ("clip_low", "clip_high"):
            if not objective.clips and getattr(self, name) != getattr(objective, name):
                raise ValueError(f"objective = {self.objective} reads no `{name}`: leave it out")
        return self


_OVER = ("clip_low", "clip_high", "beta")


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

    mismatch_max: float | None = Field(None, gt=0)
    """largest |log-prob of sampler - of trainer| of any fresh token, nats, for a log-prob below -1 divided by
    it; with bfloat16 weights the largest mean. None: 1e-4, with bfloat16 0.05"""
    patience: int = Field(3, ge=1)
    """number of steps in a row without any signal, all cut off, or collapsed, after which training stops"""


class LogsConfig(Config):
    """Use of logged runs by --from-logs; without effect on other trainings."""

    uses: int | None = Field(1, ge=1)
    """how often a logged run may be trained on, by this policy and its ancestors together. None: any"""
    mutants: int = Field(32, ge=0)
    """with fresh rollouts: further tasks, each the workspace that a passing logged run left with one line
    changed so that the run's check fails; 0 for none"""
    lambda_preference: float = Field(0.0, ge=0)
    """weight of the preference loss on outcomes that policy gradients may not use"""


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
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    guards: GuardConfig = GuardConfig()
    updates_per_step: int = Field(1, ge=1)
    """passes over the rollouts of a step; the ratio is to the weights before the first pass"""
    minibatches: int = Field(1, ge=1)
    """parts of each pass, made of whole groups, with one update each"""
    logs: LogsConfig = LogsConfig()
