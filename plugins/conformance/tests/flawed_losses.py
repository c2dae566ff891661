"""A loss written apart from ours, on padded rows, and each way in which such a loss has been got wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_rl.learn.advantages import group_advantages

T = Tensor
O = Mapping[str, Any]  # noqa: E741


def written_apart(
    lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O, flaw: str = "", where: str = ""
) -> T:
    """Right, unless a flaw is named; under one named objective alone where one is given."""
    if where and options["objective"] != where:
        flaw = ""
    o = {**options, **_other_settings(flaw, options)}
    lp, old, behaviour, reference, adv = (
        x.masked_fill(~mask, 0.0) for x in (lp, old, behaviour, reference, adv)
    )
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    if flaw == "length_with_holes":
        lengths = torch.full_like(lengths, mask.shape[1])
    if flaw == "length_of_the_longest":
        lengths = lengths.max().expand_as(lengths)

    ratio = _ratio(lp, old, behaviour, lengths, o, flaw)
    weight = _weight(lp, old, behaviour, mask, o, flaw)
    if o["reject_drift"] is not None:
        drift = ((behaviour - lp.detach()) * mask).sum(-1, keepdim=True) / lengths
        if flaw == "drift_from_the_start":
            drift = (behaviour - old).sum(-1, keepdim=True) / lengths
        poor = adv.sum(-1, keepdim=True) < 0
        if flaw == "rejects_good_sequences":
            poor = ~poor
        if flaw == "rejects_both":
            poor = poor | True
        if flaw == "rejected_by_sign":
            poor = adv < 0
        weight = weight * ~((drift > o["reject_drift"]) & poor)
    if o["beta"] > 0 and o["kl_in"] == "reward":
        kl = _kl((lp.detach() if flaw == "kl_of_the_present" else old) - reference, o["kl"]) * mask
        adv = adv - o["beta"] * _to_go(kl, flaw).masked_fill(~mask, 0.0)
    loss = weight * _surrogate(lp, ratio, adv, o, flaw)
    if o["beta"] > 0 and o["kl_in"] == "loss":
        kl = _kl(lp - reference, o["kl"])
        loss = loss + o["beta"] * kl * (weight if flaw == "kl_with_weight" else 1.0)
        if flaw == "kl_without_gradient":
            loss = loss - o["beta"] * (kl - kl.detach())
    return (_share(loss, mask, o, flaw) * loss).masked_fill(~mask, 0.0).sum()


def _other_settings(flaw: str, o: O) -> dict[str, Any]:
    return {
        "never_clips": {"clip_low": 1.0, "clip_high": 1e9},
        "never_clips_below": {"clip_low": 1.0},
        "never_clips_above": {"clip_high": 1e9},
        "symmetric_clip": {"clip_high": o["clip_low"]},
        "bounds_exchanged": {"clip_low": o["clip_high"], "clip_high": o["clip_low"]},
        "no_dual_clip": {"dual_clip": None},
        "no_floor": {"tis_floor": 0.0},
        "masks_by_truncating": {"tis_mode": "truncate"},
        "token_weights_alone": {"tis_level": "token"},
        "k3_for_every_kl": {"kl": "k3"},
        "kl_always_in_the_loss": {"kl_in": "loss"},
        "fixed_beta": {"beta": 0.3 if o["beta"] else 0.0},
        "no_rejection": {"reject_drift": None},
        "always_token_ratios": {"ratio": "token"},
        "token_mean_always": {"aggregation": "token"},
    }.get(flaw, {})


def _ratio(lp: T, old: T, behaviour: T, lengths: T, o: O, flaw: str) -> T:
    start = behaviour if flaw == "ratio_to_the_sampler" else old
    gap = start - lp if flaw == "old_and_new_exchanged" else lp - start
    if o["ratio"] == "sequence":
        mean = gap.sum(-1, keepdim=True) / (1 if flaw == "product_for_mean" else lengths)
        if flaw == "gradient_of_one_token":
            mean = mean.detach() + gap - gap.detach()
        gap = mean.expand_as(gap)
    return gap.clamp(-20, 20).exp()


def _weight(lp: T, old: T, behaviour: T, mask: T, o: O, flaw: str) -> T:
    if o["tis_cap"] is None:
        return torch.ones_like(lp)
    start = (
        lp if flaw == "weights_with_gradient" else lp.detach() if flaw == "weights_of_the_present" else old
    )
    gap = (start - behaviour) * mask
    if flaw == "weights_upside_down":
        gap = -gap
    if o["tis_level"] == "sequence":
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
        if flaw == "weight_of_the_micro_batch":
            gap = gap[:, :1].sum().expand_as(gap)
        if flaw == "sequence_weight_as_mean":
            gap = gap / mask.sum(-1, keepdim=True).clamp(min=1)
    weight = gap.clamp(-20, 20).exp()
    if o["tis_mode"] == "truncate":
        return weight.clamp(max=o["tis_cap"])
    return weight * ((weight <= o["tis_cap"]) & (weight >= o["tis_floor"]))


def _surrogate(lp: T, ratio: T, adv: T, o: O, flaw: str) -> T:
    if o["objective"] in ("rloo", "reinforce"):
        return -adv * (ratio if flaw == "reinforce_with_ratio" else lp)
    bounded = ratio.clamp(1 - o["clip_low"], 1 + o["clip_high"])
    if o["objective"] == "cispo":
        return -(bounded if flaw == "gradient_through_the_weight" else bounded.detach()) * adv * lp
    if flaw == "no_minimum":
        return -bounded * adv
    if flaw == "maximum":
        return -torch.maximum(ratio * adv, bounded * adv)
    loss = -torch.minimum(ratio * adv, bounded * adv)
    if flaw == "advantage_of_the_row":
        return loss / torch.where(adv == 0, 1.0, adv) * adv.mean(-1, keepdim=True)
    if o["dual_clip"] is not None:
        capped = torch.minimum(loss, -o["dual_clip"] * adv)
        loss = capped if flaw == "dual_clip_for_all" else torch.where(adv < 0, capped, loss)
    return loss


def _kl(gap: T, kind: str) -> T:
    if kind == "k1":
        return gap
    if kind == "k2":
        return 0.5 * gap**2
    k3 = torch.exp((-gap).clamp(-20, 20)) - 1 + gap
    return k3 if kind == "k3" else k3.detach() + 0.5 * (gap**2 - gap.detach() ** 2)


def _to_go(kl: T, flaw: str) -> T:
    if flaw == "kl_over_rows":
        return kl.flatten().flip(0).cumsum(0).flip(0).view_as(kl)
    if flaw == "kl_of_the_token":
        return kl
    if flaw == "kl_of_the_row":
        return kl.sum(-1, keepdim=True).expand_as(kl)
    after = kl.flip(-1).cumsum(-1).flip(-1)
    return after - kl if flaw == "kl_of_what_follows_alone" else after


def _share(loss: T, mask: T, o: O, flaw: str) -> T:
    tokens, sequences, own = o["num_tokens"], o["num_sequences"], o["trajectory_tokens"]
    if flaw == "mean_of_micro_batch":
        tokens, sequences = int(mask.sum()), len(mask)
    if flaw == "mean_over_rows":
        sequences, own = int(mask.any(-1).sum()), mask.sum(-1).tolist()
    if flaw == "rows_in_the_denominator":
        sequences = len(mask)
    if o["aggregation"] == "token":
        share = torch.full((len(mask), 1), 1 / max(tokens, 1), dtype=loss.dtype)
    else:
        each = own if o["aggregation"] == "sequence" else [o["constant_length"]] * len(mask)
        share = torch.tensor([[1 / max(sequences * n, 1)] for n in each], dtype=loss.dtype)
    return share


def flawed(flaw: str, where: str = "") -> Callable[..., T]:
    return partial(written_apart, flaw=flaw, where=where)


FLAWS: list[tuple[str, str]] = [
    *(("never_clips", o) for o in ("grpo", "dr_grpo", "dapo", "gspo", "ppo", "cispo")),
    *(("never_clips_below", o) for o in ("grpo", "gspo", "ppo")),
    *(("never_clips_above", o) for o in ("dr_grpo", "dapo", "cispo")),
    *(("no_minimum", o) for o in ("grpo", "dr_grpo", "dapo", "gspo", "ppo")),
    *(("no_dual_clip", o) for o in ("grpo", "dr_grpo", "dapo", "gspo", "ppo")),
    *(("dual_clip_for_all", o) for o in ("grpo", "ppo")),
    *((flaw, "") for flaw in (
        "maximum", "symmetric_clip", "bounds_exchanged", "old_and_new_exchanged", "ratio_to_the_sampler",
        "length_with_holes", "length_of_the_longest", "product_for_mean", "gradient_of_one_token",
        "always_token_ratios", "weight_of_the_micro_batch", "sequence_weight_as_mean", "weights_upside_down",
        "weights_of_the_present", "weights_with_gradient", "no_floor", "masks_by_truncating",
        "token_weights_alone", "rejects_good_sequences", "rejects_both", "rejected_by_sign", "no_rejection",
        "drift_from_the_start", "kl_over_rows", "kl_of_the_token", "kl_of_the_row", "kl_of_the_present",
        "kl_of_what_follows_alone", "kl_with_weight", "kl_without_gradient", "k3_for_every_kl",
        "kl_always_in_the_loss", "fixed_beta", "reinforce_with_ratio", "gradient_through_the_weight",
        "advantage_of_the_row", "mean_of_micro_batch", "mean_over_rows", "rows_in_the_denominator",
        "token_mean_always",
    )),
]  # fmt: skip
"""(flaw, the one objective that has it; all where none is named)"""


def mask_by_product(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Untrained columns enter through a product with zero."""
    return written_apart(lp, old, behaviour, reference, adv, mask, options) + 0 * (lp * mask).sum()


def grpo_alone(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    """Right in what it offers."""
    if options["objective"] not in ("recipe", "grpo") or options["tis_cap"] is not None:
        raise NotImplementedError
    return written_apart(lp, old, behaviour, reference, adv, mask, options)


def raises(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: O) -> T:
    raise KeyError("epsilon")


def changes_what_it_is_given(lp: T, old: T, behaviour: T, reference: T, adv: T, mask: T, options: Any) -> T:
    """In place: the caller's tensors, and its options."""
    old.copy_(lp.detach())
    behaviour.copy_(lp.detach())
    options["beta"] = 0.0
    return written_apart(lp, old, behaviour, reference, adv, mask, options)


loss = grpo_alone


def advantages(rewards: Any, *, baseline: Any, std: Any) -> list[float]:
    """The raw reward where nothing can be compared, as one framework has it."""
    if len(rewards) == 1:
        return list(rewards)
    return group_advantages(rewards, baseline=baseline, std=std)
