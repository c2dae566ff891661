"""Objectives: surrogate losses, presets of the terms around them as papers have them, and the choice of one.

    name        loss of a token                             advantage                     share of a token
    recipe      -min(r A, clip(r, 0.8, 1.2) A)              reward - mean                 1 / tokens
    grpo        -min(r A, clip(r, 0.8, 1.2) A) + 0.04 k3    (reward - mean) / std         mean in rollouts
    dr_grpo     -min(r A, clip(r, 0.8, 1.2) A)              reward - mean                 1 / (rollouts x L)
    dapo        -min(r A, clip(r, 0.8, 1.28) A)             (reward - mean) / std         1 / tokens
    gspo        -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)    (reward - mean) / std         mean in rollouts
    cispo       -stop_gradient(clip(r, 0, 5)) A log p       (reward - mean) / std         1 / tokens
    rloo        -A log p                                    reward - mean of the others   1 / rollouts
    reinforce   -A log p                                    reward                        1 / rollouts
    ppo         -min(r A, clip(r, 0.8, 1.2) A)              of the critic, per token      1 / tokens

    s = exp(mean over the sequence of (new - old))

`recipe` takes the group mean alone from Dr. GRPO and the token mean from DAPO. Deviations divide by n-1. A
sequence is a token row: if a history was rewritten, each row of the rollout has its own ratio. Importance
weights for the sampler (`tis_cap`) are on in all of them. Imports no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from nano_shared.errors import ConfigError
from nano_shared.extension_points import find_extension, takes
from nano_shared.settings import Config

if TYPE_CHECKING:
    from torch import Tensor


Baseline = Literal["mean", "rloo", "none"]
Std = Literal["none", "sample", "population"]
Aggregation = Literal["token", "sequence", "constant"]
KL = Literal["k1", "k2", "k3", "k3+"]


class Objective(Config):
    """An objective: its surrogate loss, and the terms around it that its paper names. A file of yours can
    hold another than those below, `--objective ./mine.py:MINE`. Formulas are in `loss.py` and
    `advantages.py`."""

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


def clipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective) -> Tensor:
    """[N] loss of each token: -min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most c |A|. Schulman
    et al. 2017 (arXiv 1707.06347); separate bounds: DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020 (arXiv
    1912.09729). `new_N` is not read but through the ratio."""
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = -(ratio_N * advantages_N).minimum(bounded_N * advantages_N)
    if config.dual_clip is None:
        return loss_N
    # has no effect for A > 0, where the loss is negative
    return loss_N.minimum(config.dual_clip * advantages_N.abs())


def weighted(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective) -> Tensor:
    """[N] loss of each token: the clamped ratio is a weight without gradient, so no token is dropped."""
    weight_N = ratio_N.detach().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight_N * advantages_N * new_N


def unclipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective) -> Tensor:
    """[N] loss of each token. The ratio is not used: from the second update of a step on, the gradient is
    off-policy without correction."""
    return -advantages_N * new_N


RECIPE = Objective(surrogate=clipped)

GRPO = Objective(surrogate=clipped, std="sample", aggregation="sequence", beta=0.04)
"""arXiv 2402.03300, which specifies neither the clip nor whether the deviation divides by n or n-1"""

DR_GRPO = Objective(surrogate=clipped, aggregation="constant")
"""arXiv 2503.20783: neither the deviation nor the length divides; L is `constant_length`"""

DAPO = Objective(surrogate=clipped, std="sample", clip_high=0.28)
"""arXiv 2503.14476; its dynamic sampling is `refill`, its overlong penalty `overlong` = shape"""

GSPO = Objective(
    surrogate=clipped, std="sample", ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"
)
"""arXiv 2507.18071"""

CISPO = Objective(surrogate=weighted, std="sample", clip_low=1.0, clip_high=4.0)
"""arXiv 2506.13585, which bounds the weight from above only, by a tuned constant: here 1 + 4 = 5"""

_REINFORCE = Objective(
    surrogate=unclipped, clips=False, aggregation="constant", constant_length=1, kl="k1",
    kl_in="reward",
)  # fmt: skip

RLOO = _REINFORCE.with_terms(baseline="rloo")
"""arXiv 2402.14740; KL, if any, is subtracted from the reward"""

REINFORCE = _REINFORCE.with_terms(baseline="none")
"""Williams 1992"""

PPO = Objective(surrogate=clipped, critic=True, baseline="none", kl="k1", kl_in="reward")
"""arXiv 1707.06347; rewards are not compared within groups"""


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
