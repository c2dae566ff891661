"""Invariances: splitting, ordering, padding or repeating a step must not change the gradient; stale samplers.

For a stale sampler, bias and variance of each off-policy correction are measured against the exact gradient
of the present policy: sequences are sampled by an older policy, the advantage is the reward minus its
expectation, and the expected gradient of the loss is compared with the same correction written as sums over
scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from nano_conformance.adapter import Subject
from nano_conformance.case import TENSORS, Compared, ConformanceCheck, LossCase, Run, make_case
from nano_conformance.exact import Language, beside, expected_ascent
from nano_conformance.grid import drawn_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    name: str
    settings: dict[str, Any]
    factor_ST: Tensor
    """factor of advantage x score"""
    as_old: bool = False
    """True if the older policy is that of the start of the step (a later update), not the sampler"""


def stale_samplers(draw: int = 0) -> Iterator[ConformanceCheck]:
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
        yield ConformanceCheck(criterion="AC-18", name=f"stale: {c.name}", note=note, run=run)


def _compare(expected: Tensor, language: Language, subject: Subject, **how: Any) -> Compared:
    return expected, expected_ascent(language, subject, size=1, **how)


def corrections(language: Language, advantage_S: Tensor) -> list[Correction]:
    """All corrections; variance of one rollout, in units of the exact gradient's squared norm."""
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


OBJECTIVES = ("recipe", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo")
SETTINGS: dict[str, Mapping[str, Any]] = {
    "as its paper has it": {},
    "sequence weights, rejection": {"tis_cap": 1.6, "tis_level": "sequence", "reject_drift": 0.15},
    "masked weights, KL in the loss": {
        "tis_cap": 1.6, "tis_mode": "mask", "beta": 0.3, "kl": "k3", "kl_in": "loss"
    },
    "KL in the reward": {"beta": 0.3, "kl": "k1", "kl_in": "reward"},
}  # fmt: skip
"""settings under which a loss might mix values of different rows"""
Changed = Callable[[LossCase, Subject, Random], Compared]


def invariances(draw: int = 0) -> Iterator[ConformanceCheck]:
    for objective in OBJECTIVES:
        for criterion, name, run in (
            ("AC-10", "cut into micro-batches", _cut),
            ("AC-10", "rows in another order", _order),
            ("AC-10", "every row twice", _twice),
            ("AC-11", "padding and holes of any content", _padding),
            ("AC-12", "a row without trained tokens", _empty_row),
            ("AC-11", "nothing trained at all", _nothing),
        ):
            runs: list[tuple[str, Run]] = [
                (settings, partial(_run, run, draw, objective, settings)) for settings in SETTINGS
            ]
            yield ConformanceCheck(
                criterion=criterion, name=f"{objective}: {name}", tolerance=1e-12, run=runs
            )
    yield ConformanceCheck(
        criterion="AC-14", name="a trajectory in one row or in two", run=_rows_of_a_trajectory
    )


def _run(change: Changed, draw: int, objective: str, settings: str, subject: Subject) -> Compared:
    name = f"{draw} {objective} {settings}"
    return change(drawn_step(name, objective=objective, **SETTINGS[settings]), subject, Random(name))


def _cut(case: LossCase, subject: Subject, random: Random) -> Compared:
    """Split into two to four micro-batches of random rows."""
    rows = list(range(len(case.mask)))
    random.shuffle(rows)
    cuts = sorted(random.sample(range(1, len(rows)), random.randint(1, 3)))
    gradient = torch.zeros_like(case.logprobs)
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        gradient[rows[start:stop]] = case.rows(*rows[start:stop]).gradient(subject.loss)
    return case.gradient(subject.loss), gradient


def _order(case: LossCase, subject: Subject, random: Random) -> Compared:
    order = list(range(len(case.mask)))
    random.shuffle(order)
    gradient = torch.zeros_like(case.logprobs)
    gradient[order] = case.rows(*order).gradient(subject.loss)
    return case.gradient(subject.loss), gradient


def _twice(case: LossCase, subject: Subject, random: Random) -> Compared:
    """Repeat every row: each copy must have half of the row's gradient."""
    of = case.options
    options = {
        **of, "num_tokens": 2 * of["num_tokens"], "num_sequences": 2 * of["num_sequences"],
        "trajectory": [*of["trajectory"], *(f"again {name}" for name in of["trajectory"])],
        "trajectory_tokens": of["trajectory_tokens"] * 2,
    }  # fmt: skip
    double = LossCase(**{n: torch.cat([getattr(case, n)] * 2) for n in TENSORS}, options=options)
    first, second = double.gradient(subject.loss).chunk(2)
    return case.gradient(subject.loss).repeat(2, 1), 2 * torch.cat([first, second])


def _padding(case: LossCase, subject: Subject, random: Random) -> Compared:
    """Compare values and gradients: 0 x NaN may show in only one of them."""
    wanted = torch.nn.functional.pad(case.gradient(subject.loss), (0, 2))
    value = case.value(subject.loss)
    expected, actual = [], []
    for poison in (0.0, -50.0, math.nan, -math.inf, math.inf):
        poisoned = case.padded(2, with_value=poison)
        expected += [wanted.flatten(), value.reshape(1)]
        actual += [poisoned.gradient(subject.loss).flatten(), poisoned.value(subject.loss).reshape(1)]
    return torch.cat(expected), torch.cat(actual)


def _empty_row(case: LossCase, subject: Subject, random: Random) -> Compared:
    place = random.randrange(len(case.mask))
    order = [*range(place + 1), *range(place, len(case.mask))]
    more = case.rows(*order)
    mask = more.mask.clone()
    mask[place] = False
    names, tokens = list(more.options["trajectory"]), list(more.options["trajectory_tokens"])
    names[place], tokens[place] = "without a trained token", 0
    more = replace(
        more, mask=mask, options={**more.options, "trajectory": names, "trajectory_tokens": tokens}
    )
    gradient = case.gradient(subject.loss)
    wanted = torch.cat([gradient[:place], torch.zeros_like(gradient[:1]), gradient[place:]])
    return wanted, more.gradient(subject.loss)


def _nothing(case: LossCase, subject: Subject, random: Random) -> Compared:
    """A step without trained tokens, and a micro-batch without trained tokens in a step with others."""
    nothing = torch.zeros_like(case.mask)
    names = [f"without {place}" for place in range(len(nothing))]
    beside = {**case.options, "trajectory": names, "trajectory_tokens": [0] * len(names)}
    alone = {**beside, "num_tokens": 0, "num_sequences": 0}
    values = [
        float(replace(case, mask=nothing, options=options).value(subject.loss)) for options in (beside, alone)
    ]
    return [0.0, 0.0], values


def _rows_of_a_trajectory(subject: Subject) -> Compared:
    """Under the mean over sequences: a trajectory of eight tokens in one row or in two."""
    two: dict[str, Any] = {"aggregation": "sequence"}
    whole = make_case([[-1.0] * 8, [-1.0] * 4], [[1.0] * 8, [1.0] * 4], **two)
    cut = make_case([[-1.0] * 4] * 3, [[1.0] * 4] * 3, trajectory=["a", "a", "b"], **two)
    return whole.gradient(subject.loss)[0], cut.gradient(subject.loss)[:2].flatten()
