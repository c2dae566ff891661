"""A stale sampler: bias and variance of each correction, against the exact gradient of the present policy.

Sequences come from an older policy; a rollout's advantage is its reward less the expected one. The expected
gradient of the loss is compared with the same correction written out over scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.adapter import Subject
from nano_rl.conformance.case import Check, Compared
from nano_rl.conformance.expectation import Language, beside, expected_ascent


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    name: str
    settings: dict[str, Any]
    factor_ST: Tensor
    """what multiplies advantage times score"""
    as_old: bool = False
    """the older policy is the trainer's at the start of the step, as on a later update, not the sampler's"""


def stale_samplers(draw: int = 0) -> Iterator[Check]:
    language = Language(3, 3)
    exact = language.gradient(language.expected_reward)
    advantage_S = (language.rewards_S - language.expected_reward).detach()
    scores_STP = language.scores_STP()
    p_S = language.probabilities_S(language.stale)

    def advantages(members: Sequence[int]) -> Tensor:
        return advantage_S[list(members)]

    for c in corrections(language, advantage_S):
        ascents_SP = ((c.factor_ST * language.mask_ST * advantage_S[:, None])[..., None] * scores_STP).sum(1)
        mean_P = (p_S[:, None] * ascents_SP).sum(0)
        variance = float((p_S * (ascents_SP - mean_P).square().sum(-1)).sum() / exact.square().sum())
        how: dict[str, Any] = {"start": language.stale} if c.as_old else {}
        settings = {"aggregation": "constant", "constant_length": 1, **c.settings}
        run = partial(
            _compare, mean_P, language, advantages=advantages, sampler=language.stale, **how, **settings
        )
        note = f"{beside(mean_P, exact)}, variance {variance:.1f}"
        yield Check(criterion="AC-18", name=f"stale: {c.name}", note=note, run=run)


def _compare(expected: Tensor, language: Language, subject: Subject, **how: Any) -> Compared:
    return expected, expected_ascent(language, subject, size=1, **how)


def corrections(language: Language, advantage_S: Tensor) -> list[Correction]:
    """Variance is of one rollout, in units of the squared size of the exact gradient."""
    gap_ST = (language.logprobs_ST(language.logits) - language.logprobs_ST(language.stale)).detach()
    token = gap_ST.exp()
    whole = gap_ST.sum(-1, keepdim=True).exp().expand_as(token)
    one = torch.ones_like(token)
    sign = advantage_S[:, None]
    # a clipped token has no gradient where the clip makes its loss worse
    unclipped = ~(((token > 1.2) & (sign > 0)) | ((token < 0.8) & (sign < 0)))
    mean = (gap_ST.sum(-1) / language.lengths_S).exp()[:, None].expand_as(token)
    sequence_kept = ~(((mean > 1.2) & (sign > 0)) | ((mean < 0.8) & (sign < 0)))
    sequence = {"tis_level": "sequence"}
    return [
        Correction(name="no weights", settings={}, factor_ST=one),
        Correction(name="token weights, uncapped", settings={"tis_cap": 1e6}, factor_ST=token),
        Correction(
            name="token weights, truncated at 1.5", settings={"tis_cap": 1.5}, factor_ST=token.clamp(max=1.5)
        ),
        Correction(
            name="token weights, masked above 1.5", settings={"tis_cap": 1.5, "tis_mode": "mask"},
            factor_ST=token * (token <= 1.5),
        ),
        Correction(name="sequence weights, uncapped", settings={"tis_cap": 1e6, **sequence}, factor_ST=whole),
        Correction(
            name="sequence weights, truncated at 1.5", settings={"tis_cap": 1.5, **sequence},
            factor_ST=whole.clamp(max=1.5),
        ),
        Correction(
            name="sequence weights, masked above 1.5",
            settings={"tis_cap": 1.5, "tis_mode": "mask", **sequence},
            factor_ST=whole * (whole <= 1.5),
        ),
        Correction(name="clipped ratio 0.2", settings={}, factor_ST=token * unclipped, as_old=True),
        Correction(
            name="cispo, weight up to 1.5", settings={"objective": "cispo", "clip_high": 0.5},
            factor_ST=token.clamp(max=1.5), as_old=True,
        ),
        Correction(
            name="gspo, clip 0.2", settings={"objective": "gspo", "clip_low": 0.2, "clip_high": 0.2},
            factor_ST=mean * sequence_kept, as_old=True,
        ),
    ]  # fmt: skip
