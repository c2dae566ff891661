"""The adapter: the signature of the loss function that the conformance suite checks, and nano's own loss.

    # my_loss.py, for `nano-rl conformance --against my_loss.py`
    def loss(logprobs, old, behaviour, reference, advantages, mask, options):
        if options["objective"] not in ("recipe", "grpo"):
            raise NotImplementedError
        ...
        return the scalar to be minimised

A loss raises NotImplementedError for options that it does not support; such cases are skipped.
With r = new / old, w = old / behaviour, and rows, means and sums over trained tokens alone, the loss is

    sum over rows and tokens of share * ( w * surrogate(r, A) + beta * kl(new, reference) )

    share       1 / num_tokens, 1 / (num_sequences * trajectory_tokens), 1 / (num_sequences * constant_length)
    surrogate   -min(r A, clip(r) A), under `dual_clip` c and A < 0 at most c |A|; cispo -clip(r) A log p,
                without gradient through r; reinforce and rloo -A log p
    r           under ratio = sequence the geometric mean over the row, whose tokens all get gradient
    w           without gradient; under tis_level = sequence the product over the row; 1 without `tis_cap`
    reject      w is 0 on a row of negative mean A whose mean of behaviour - new is above `reject_drift`
    kl          under kl_in = reward, beta * kl(old, reference) of a token and all after it in its row is
                taken from A, and nothing is added

`nano_conformance/by_hand.py` says the same in plain loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nano_rl.learn.advantages import gae, group_advantages, turn_advantages, whitened
from nano_rl.learn.batch import Batch
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.loss import policy_loss, token_share, token_weights
from nano_rl.learn.objectives import Aggregation, Objective, find_objective

SETTINGS = (
    "objective", "clip_low", "clip_high", "dual_clip", "ratio", "aggregation", "constant_length", "tis_cap",
    "tis_mode", "tis_floor", "tis_level", "reject_drift", "beta", "kl", "kl_in",
)  # fmt: skip
"""the name of an objective, and fields of `Objective`, that are passed in `options`"""


def objective_of(settings: Mapping[str, Any]) -> Objective:
    """The objective of these settings; others than `SETTINGS` are left out."""
    terms = {name: settings[name] for name in SETTINGS[1:] if name in settings}
    return find_objective(settings.get("objective", "recipe")).with_terms(**terms)


def settings_of(objective: str = "recipe", **terms: Any) -> dict[str, Any]:
    """All `SETTINGS` of an objective; without importance weights by default."""
    whole = objective_of({"objective": objective, "tis_cap": None, **terms})
    return {"objective": objective} | whole.model_dump(include=set(SETTINGS[1:]))


class LossFunction(Protocol):
    def __call__(
        self,
        logprobs: Tensor,
        old: Tensor,
        behaviour: Tensor,
        reference: Tensor,
        advantages: Tensor,
        mask: Tensor,
        options: Mapping[str, Any],
    ) -> Tensor:
        """The scalar loss of one micro-batch of a step; the losses of all micro-batches are added up.

        All tensors are [B, T]: log-probs (nats, float64) of the policy with gradient, of the trainer's policy
        at the start of the step, of the sampler and of the reference; advantages; mask (bool), False on what
        is not trained, where the others hold anything. `options` holds `SETTINGS`, and of the whole step
        `num_tokens` and `num_sequences` (trajectories with a trained token); and of each row, [B],
        `trajectory` (its name) and `trajectory_tokens` (trained tokens in all rows of its trajectory).

        Raises NotImplementedError for options that it does not offer.
        """


class Subject:
    """The subject of the suite: a loss, and optional credit functions."""

    def __init__(
        self, *, name: str, loss: LossFunction, credit: Mapping[str, Callable[..., Any]] | None = None
    ):
        """`credit` holds functions of `CREDIT` by name."""
        self.name, self.loss, self._credit = name, loss, dict(credit or {})

    def function(self, name: str) -> Callable[..., Any]:
        """A credit function. Raises NotImplementedError if the subject has none of that name."""
        if name not in self._credit:
            raise NotImplementedError
        return self._credit[name]


CREDIT = ("advantages", "turn_advantages", "gae", "whitened", "weights")
"""Functions that may stand beside a loss:

    advantages(rewards, *, baseline, std)           [G] of one group; None is a missing reward and gets 0
    turn_advantages(rewards, *, discount, baseline) [G][T] from what each turn of each rollout earned, or None
    gae(rewards, values, *, discount, lam)          ([N] advantages, [N] returns) of one chain of tokens
    whitened(advantages, masks)                     [rows][L] over the tokens whose mask is 1, 0 elsewhere
    weights(trajectories, tokens, *, aggregation, constant_length)
                                                    [B] of each row's tokens, from the name of its trajectory
                                                    and the number of its trained tokens

`baseline` is mean, rloo or none, `std` none, sample (n-1) or population (n), of the whole group also under
rloo. A group whose scored rewards are all equal, or of fewer than two, gets 0 under a baseline. A turn is
compared with the mean over rollouts (rloo: over the others) of the mean return of their turns.
"""


def our_loss(
    logprobs: Tensor,
    old: Tensor,
    behaviour: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: Mapping[str, Any],
) -> Tensor:
    """`nano_rl.learn.loss.policy_loss`."""
    config = objective_of(options)
    shares = [
        token_share(
            config.aggregation, own=own, tokens=options["num_tokens"],
            trajectories=options["num_sequences"], constant_length=config.constant_length,
        )
        for own in options["trajectory_tokens"]
    ]  # fmt: skip
    # on the first update of a step a training has no old log-probs
    first = torch.equal(old[mask], logprobs.detach()[mask])
    batch = Batch(
        ids_BT=torch.zeros_like(mask, dtype=torch.int64),
        attention_BT=torch.ones_like(mask, dtype=torch.int64),
        mask_BT=mask,
        behaviour_logprobs_BT=behaviour,
        advantages_BT=advantages,
        weight_BT=torch.tensor(shares, dtype=torch.float64)[:, None] * mask,
        temperature_B=torch.ones(len(mask), dtype=torch.float64),
        run_ids=tuple(options["trajectory"]),
        old_logprobs_BT=None if first else old,
        reference_logprobs_BT=reference,
    )
    return policy_loss(logprobs, batch, config)[0]


def our_weights(
    trajectories: Sequence[str], tokens: Sequence[int], *, aggregation: Aggregation, constant_length: int
) -> list[float]:
    """`nano_rl.learn.loss.token_weights`."""
    rows = [
        TrainSample(
            run_id=name, ids=(0,) * (count + 1), mask=(0, *[1] * count), logprobs=(0.0,) * (count + 1),
            versions=(0,) * (count + 1), advantage=0.0, temperature=1.0,
        )
        for name, count in zip(trajectories, tokens, strict=True)
    ]  # fmt: skip
    return token_weights(rows, aggregation, constant_length=constant_length)


OURS = Subject(
    name="nano_rl",
    loss=our_loss,
    credit={
        "advantages": group_advantages, "turn_advantages": turn_advantages, "gae": gae, "whitened": whitened,
        "weights": our_weights,
    },
)  # fmt: skip
