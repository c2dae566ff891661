"""Losses as they have been got wrong, for the suite to find: each differs from ours in one thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.adapter import our_loss
from nano_rl.credit.advantage import group_advantages

T = Tensor
O = Mapping[str, Any]  # noqa: E741


def mean_of_micro_batch(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """The denominator is the micro-batch's own."""
    own = {**options, "num_tokens": max(int(mask.sum()), 1), "num_sequences": max(len(mask), 1)}
    return our_loss(lp, old, behaviour, reference, adv, mask, own)


def mask_forgotten(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Untrained columns enter through a product with zero."""
    return our_loss(lp, old, behaviour, reference, adv, mask, options) + 0 * (lp * mask).sum()


def weights_of_the_present(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Importance weights from the current log-probs instead of those at the start of the step."""
    moved = behaviour + (old - lp.detach())
    return our_loss(lp, old, moved, reference, adv, mask, options)


def rejected_by_sign(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Tokens of negative advantage alone leave a rejected sequence."""
    if options["reject_drift"] is None:
        return our_loss(lp, old, behaviour, reference, adv, mask, options)
    kept = our_loss(lp, old, behaviour, reference, adv.clamp(min=0), mask, {**options, "reject_drift": None})
    return kept


def gradient_through_the_weight(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """CISPO without the stop of the gradient."""
    loss = our_loss(lp, old, behaviour, reference, adv, mask, options)
    if options["objective"] != "cispo":
        return loss
    ratio = (torch.where(mask, lp - old, 0.0)).exp()
    return loss - torch.where(mask, (ratio - ratio.detach()) * adv * lp.detach(), 0.0).sum()


def mean_over_rows(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Rows count as sequences: two rows of a trajectory weigh twice."""
    rows = {
        **options,
        "num_sequences": int(mask.any(-1).sum()) or 1,
        "trajectory_tokens": mask.sum(-1).tolist(),
    }
    return our_loss(lp, old, behaviour, reference, adv, mask, rows)


def k3_for_every_kl(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """The estimator that was asked for is not read."""
    return our_loss(lp, old, behaviour, reference, adv, mask, {**options, "kl": "k3", "kl_in": "loss"})


def grpo_alone(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Right in what it offers."""
    if options["objective"] not in ("recipe", "grpo") or options["tis_cap"] is not None:
        raise NotImplementedError
    return our_loss(lp, old, behaviour, reference, adv, mask, options)


def raises(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    raise KeyError("epsilon")


loss = grpo_alone


def advantages(rewards: Any, *, baseline: Any, std: Any) -> list[float]:
    """The raw reward where nothing can be compared, as one framework has it."""
    if len(rewards) == 1:
        return list(rewards)
    return group_advantages(rewards, baseline=baseline, std=std)
