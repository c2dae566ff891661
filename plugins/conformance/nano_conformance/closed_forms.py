"""Closed forms: small cases with losses and gradients computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nano_conformance.adapter import Subject
from nano_conformance.case import Compared, ConformanceCheck, LossCase, make_case

THREE = ([0.5, 1.0, 1.5], [1.0, -1.0, 2.0])
"""ratios and advantages"""
CLIPPED = {"recipe": "token", "grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "ppo": "token"}
"""objective -> its aggregation"""
LENGTH = 10
TABLE = [
    [(0.5, 1.0, -0.5, -0.5), (0.5, -1.0, 0.8, 0.0), (1.1, -2.0, 2.2, 2.2), (1.5, 1.0, -1.28, 0.0)],
    [(4.0, -1.0, 4.0, 4.0), (4.0, 1.0, -1.28, 0.0), (1.5, -1.0, 1.5, 1.5), (1.0, 2.0, -2.0, -2.0),
     (0.9, 1.0, -0.9, -0.9)],
]  # fmt: skip
"""two rows of (ratio, advantage, loss with clip 0.2 and 0.28, derivative by the log-prob)"""
DUAL_TABLE = [TABLE[0], [(4.0, -1.0, 3.0, 0.0), *TABLE[1][1:]]]
"""the same with a dual clip of 3"""


def closed_forms(draw: int = 0) -> Iterator[ConformanceCheck]:
    for objective in CLIPPED:
        yield _clip_table(f"{objective}: clip", objective, TABLE)
        yield _clip_table(f"{objective}: dual clip", objective, DUAL_TABLE, dual_clip=3.0)
    yield from _surrogates()
    yield from _weights()
    yield from _kl()
    yield from _aggregation()


def at_ratios(
    ratios: Sequence[float], advantages: Sequence[float], new: Sequence[float], **more: Any
) -> LossCase:
    """One row with these ratios of new to old policy."""
    old = [n - math.log(r) for n, r in zip(new, ratios, strict=True)]
    return make_case([new], [advantages], old=[old], **more)


def _value(
    criterion: str, name: str, expected: float, case: LossCase, tolerance: float = 1e-9
) -> ConformanceCheck:
    return ConformanceCheck(
        criterion=criterion, name=name, tolerance=tolerance,
        run=lambda subject: ([expected], case.value(subject.loss).reshape(1)),
    )  # fmt: skip


def _gradient(criterion: str, name: str, expected: Sequence[float], case: LossCase) -> ConformanceCheck:
    return ConformanceCheck(
        criterion=criterion,
        name=name,
        run=lambda subject: (
            torch.tensor([list(expected)], dtype=torch.float64),
            case.gradient(subject.loss),
        ),
    )


def _clip_table(
    name: str, objective: str, table: Sequence[Sequence[tuple[float, ...]]], **settings: Any
) -> ConformanceCheck:
    """A check of the cells of a table, under an objective with its aggregation."""
    ratios, advantages, losses, slopes = ([[cell[i] for cell in row] for row in table] for i in range(4))
    mean = CLIPPED[objective]
    how: dict[str, Any] = {"aggregation": mean, "beta": 0.0, "clip_low": 0.2, "clip_high": 0.28, **settings}
    if mean == "constant":
        how["constant_length"] = LENGTH
    old = [[-1.0 - math.log(r) for r in row] for row in ratios]
    case = make_case(
        [[-1.0] * len(row) for row in table], advantages, old=old, objective=objective, **how
    )  # fmt: skip
    tokens = sum(map(len, table))
    shares = {
        "token": [1 / tokens] * 2, "sequence": [1 / 2 / len(row) for row in table],
        "constant": [1 / 2 / LENGTH] * 2,
    }[mean]  # fmt: skip
    weighed = [share * loss for share, row in zip(shares, losses, strict=True) for loss in row]
    steep = [share * slope for share, row in zip(shares, slopes, strict=True) for slope in row]

    def run(subject: Subject) -> Compared:
        value, gradient = case.both(subject.loss)
        return [sum(weighed), *steep], torch.cat([value.reshape(1), gradient[case.mask]])

    def where(at: list[int]) -> str:
        ratio, advantage, *_ = [cell for row in table for cell in row][at[0] - 1]
        return f"slope of ratio {ratio:g} at advantage {advantage:g}"

    return ConformanceCheck(
        criterion="AC-16", name=name, run=run, where=lambda at: where(at) if at[0] else "the loss"
    )  # fmt: skip


def _surrogates() -> Iterator[ConformanceCheck]:
    new = [-0.5, -1.0, -1.5]
    yield _value("AC-16", "clip", (-0.5 + 1 - 2.4) / 3, at_ratios(*THREE, new))
    yield _value("AC-15", "ratio one", -2 / 3, make_case([new], [THREE[1]]))
    yield _gradient("AC-15", "gradient is REINFORCE's", [-1 / 3, 1 / 3, -2 / 3], make_case([new], [THREE[1]]))
    yield _value(
        "AC-16", "clip higher", (-1.28 + 0.8) / 2,
        at_ratios([1.4, 0.5], [1.0, -1.0], [-1.0, -1.0], objective="dapo"),
    )  # fmt: skip
    dual = at_ratios([2.0, 2.0, 0.5], [2.0, -2.0, 2.0], [-1.0] * 3, dual_clip=1.5)
    yield _value("AC-16", "dual clip", (-2.4 + 3 - 1) / 3, dual)
    reinforce = make_case([new], [THREE[1]], objective="reinforce", aggregation="token")
    yield _value("AC-16", "reinforce", 2.5 / 3, reinforce)
    four, advantages = [-0.7, -1.2, -0.4, -2.1], [1.0, -0.5, 2.0, -1.0]
    cispo = at_ratios(
        [1.0, 1.14, 1.56, 0.4], advantages, four, objective="cispo", clip_low=0.2, clip_high=0.28
    )
    yield _value("AC-16", "cispo", (0.7 - 0.684 + 1.024 - 1.68) / 4, cispo)
    slopes = [-c * a / 4 for c, a in zip([1.0, 1.14, 1.28, 0.8], advantages, strict=True)]
    yield _gradient("AC-16", "cispo: no gradient through the ratio", slopes, cispo)
    s = math.exp(sum(map(math.log, THREE[0])) / 3)
    gspo = at_ratios(*THREE, new, objective="gspo", clip_low=0.2, clip_high=0.2)
    yield _value("AC-16", "gspo", -s * 2 / 3, gspo)
    yield _gradient("AC-16", "gspo: each token moves the one ratio", [-s * 2 / 9] * 3, gspo)


def _weights() -> Iterator[ConformanceCheck]:
    old, behaviour = [-1.0] * 3, [-0.5, -1.5, -0.8]
    new = [o + math.log(r) for o, r in zip(old, THREE[0], strict=True)]
    weights = [math.exp(o - b) for o, b in zip(old, behaviour, strict=True)]
    losses = [-0.5, 1.0, -2.4]

    def case(**settings: Any) -> LossCase:
        return make_case([new], [THREE[1]], old=[old], behaviour=[behaviour], **settings)

    def mean(of: Sequence[float]) -> float:
        return sum(w * loss for w, loss in zip(of, losses, strict=True)) / 3

    yield _value("AC-18", "weights, uncapped", mean(weights), case(tis_cap=100.0))
    yield _value("AC-18", "weights, truncated", mean([min(w, 0.8) for w in weights]), case(tis_cap=0.8))
    masked = mean([w * (0.7 <= w <= 1) for w in weights])
    yield _value("AC-18", "weights, masked", masked, case(tis_cap=1.0, tis_mode="mask", tis_floor=0.7))
    product = math.prod(weights)
    whole = mean([product] * 3)
    yield _value("AC-18", "weights of sequences", whole, case(tis_cap=100.0, tis_level="sequence"))
    gspo = {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.2, "tis_level": "sequence"}
    s = math.exp(sum(map(math.log, THREE[0])) / 3)
    yield _value("AC-18", "gspo under sequence weights", -0.8 * s * 2 / 3, case(**gspo, tis_cap=0.8))
    far, near = [[-900.0] * 4, [-2.0] * 5], [[-1.0] * 4, [-2.0] * 5]
    worse = [[-1.0] * 4, [0.5] * 5]
    for name, apart in {
        "policy and start": make_case(near, worse, old=far),
        "start and sampler": make_case(near, worse, behaviour=far, tis_cap=1e12),
        "start and sampler, sequences": make_case(
            near, worse, behaviour=far, tis_cap=1e12, tis_level="sequence"
        ),
        "policy and reference": make_case(far, worse, reference=near, beta=1.0, kl="k3"),
    }.items():
        yield _finite(f"far apart: {name}", apart)
    yield from _far_apart()
    drifted = make_case(
        [[0.0] * 3], [[-0.5, 0.25, -0.25]], old=[[1.0] * 3], behaviour=[[1.0] * 3], reject_drift=0.1
    )
    yield _gradient("AC-19", "a sequence is rejected whole", [0.0] * 3, drifted)


def _finite(name: str, case: LossCase) -> ConformanceCheck:
    def run(subject: Subject) -> Compared:
        value, gradient = case.both(subject.loss)
        answered = torch.cat([value.reshape(1), gradient.flatten()])
        return torch.ones(len(answered)), answered.isfinite()

    return ConformanceCheck(criterion="AC-18", name=name, run=run)


def _far_apart() -> Iterator[ConformanceCheck]:
    """Log-ratios of six nats per token: they may be bounded at 20 nats, not below."""
    new, far = [[-1.0] * 4, [-2.0] * 5], [[-7.0] * 4, [-2.0] * 5]
    worse, big = [[-1.0] * 4, [0.0] * 5], math.exp(6.0)
    plain: dict[str, Any] = {"aggregation": "constant", "constant_length": 1}
    ratio = make_case(new, worse, old=far, **plain)
    yield _value("AC-18", "a ratio of six nats", 4 * big / 2, ratio, tolerance=1e-8)
    weight = make_case(new, worse, behaviour=far, tis_cap=1e5, **plain)
    yield _value("AC-18", "a weight of six nats", 4 * big / 2, weight, tolerance=1e-8)
    three, sampled = [[-1.0] * 3, [-2.0] * 5], [[-7.0] * 3, [-2.0] * 5]
    level: dict[str, Any] = {"tis_level": "sequence", "tis_cap": 1e10, **plain}
    sequence = make_case(three, [[-1.0] * 3, [0.0] * 5], behaviour=sampled, **level)
    yield _value("AC-18", "a sequence weight of 18 nats", 3 * math.exp(18) / 2, sequence, tolerance=1e-5)
    kl = make_case(far, [[0.0] * 4, [0.0] * 5], reference=new, beta=1.0, kl="k3", **plain)
    yield _value("AC-24", "a KL of six nats", 4 * (big - 1 - 6) / 2, kl, tolerance=1e-8)


def _kl() -> Iterator[ConformanceCheck]:
    values: dict[str, list[float]] = {
        "k1": [-1, 14, 29],
        "k2": [0.5, 98, 420.5],
        "k3": [math.e - 2, math.exp(-14) + 13, math.exp(-20) + 28],
    }
    for kind, expected in values.items():
        case = make_case([[-1.0] * 3], [[0.0] * 3], reference=[[0.0, -15.0, -30.0]], beta=1.0, kl=kind)
        yield _value("AC-24", f"{kind} in the loss", sum(expected) / 3, case, tolerance=1e-8)
    steep: dict[str, list[float]] = {
        "k1": [1, 1], "k2": [1, 2], "k3": [1 - math.exp(-1), 1 - math.exp(-2)], "k3+": [1, 2],
    }  # fmt: skip
    for kind, expected in steep.items():
        case = make_case([[-1.0] * 2], [[0.0] * 2], reference=[[-2.0, -3.0]], beta=2.0, kl=kind)
        yield _gradient("AC-24", f"slope of {kind}", expected, case)
    paid = make_case([[-1.0] * 2], [[1.0] * 2], reference=[[-2.0, -4.0]], beta=0.5, kl="k1", kl_in="reward")
    yield _gradient("AC-24", "k1 in the reward, charged to what led to it", [0.5, 0.25], paid)


def _aggregation() -> Iterator[ConformanceCheck]:
    ragged, advantages = [[-1.0] * 2, [-1.0] * 6], [[1.0] * 2, [-1.0] * 6]
    for aggregation, expected in (("sequence", 0.0), ("token", 0.5), ("constant", 0.25)):
        length: dict[str, Any] = {"constant_length": 8} if aggregation == "constant" else {}
        case = make_case(ragged, advantages, aggregation=aggregation, **length)
        yield _value("AC-9", f"{aggregation} mean", expected, case)
