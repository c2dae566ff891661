"""The adapter: the one function that the suite asks of a loss, and ours as an example of it.

    # my_loss.py, for `nano-rl conformance --against my_loss`
    def loss(logprobs, old, behaviour, reference, advantages, mask, options):
        if options["objective"] not in ("recipe", "grpo"):
            raise NotImplementedError
        ...
        return the scalar to be minimised

An option that a loss does not offer is answered with NotImplementedError, and counts neither for nor against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nano_rl.aggregation import token_share
from nano_rl.batch import Batch
from nano_rl.credit.advantage import Baseline, Std, group_advantages
from nano_rl.loss import policy_loss
from nano_rl.objectives.config import ObjectiveConfig

SETTINGS = (
    "objective", "clip_low", "clip_high", "dual_clip", "ratio", "aggregation", "constant_length", "tis_cap",
    "tis_mode", "tis_floor", "tis_level", "reject_drift", "beta", "kl", "kl_in",
)  # fmt: skip
"""fields of `ObjectiveConfig` that are passed in `options`, each with its meaning there"""


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


class AdvantageFunction(Protocol):
    def __call__(self, rewards: Sequence[float | None], *, baseline: Baseline, std: Std) -> Sequence[float]:
        """[G] advantages of one group; a reward of None is missing. Raises NotImplementedError likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is held against the suite."""

    name: str
    loss: LossFunction
    advantages: AdvantageFunction | None


def our_loss(
    logprobs: Tensor,
    old: Tensor,
    behaviour: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: Mapping[str, Any],
) -> Tensor:
    """`nano_rl.loss.policy_loss`."""
    config = ObjectiveConfig(**{name: options[name] for name in SETTINGS})
    shares = [
        token_share(
            config.aggregation, own=own, tokens=options["num_tokens"],
            trajectories=options["num_sequences"], constant_length=config.constant_length,
        )
        for own in options["trajectory_tokens"]
    ]  # fmt: skip
    batch = Batch(
        ids_BT=torch.zeros_like(mask, dtype=torch.int64),
        attention_BT=torch.ones_like(mask, dtype=torch.int64),
        mask_BT=mask,
        behaviour_logprobs_BT=behaviour,
        advantages_BT=advantages,
        weight_BT=torch.tensor(shares, dtype=torch.float64)[:, None] * mask,
        temperature_B=torch.ones(len(mask), dtype=torch.float64),
        num_action_tokens=options["num_tokens"],
        run_ids=tuple(options["trajectory"]),
        old_logprobs_BT=old,
        reference_logprobs_BT=reference,
    )
    return policy_loss(logprobs, batch, config)[0]


OURS = Subject(name="nano_rl", loss=our_loss, advantages=group_advantages)
