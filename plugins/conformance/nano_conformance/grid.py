"""The grid: loss and gradient of every objective under every setting, against the reference implementation.

Objective x importance weights x KL x clip x rejection x aggregation, on a later update with a stale sampler;
a subset on a first update, on a later update, and on a first update with a stale sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from random import Random
from typing import Any, Literal

import torch

from nano_conformance.adapter import Subject
from nano_conformance.by_hand import loss_by_hand
from nano_conformance.case import Compared, ConformanceCheck, LossCase, Run, make_case

Since = Literal["first update", "later update", "stale sampler", "stale first"]
"""what differs between sampler and policy: nothing; the policy was updated in this step; also, the sampler
was older; the sampler was older, and the policy was not updated in this step"""

LOW, HIGH, DUAL, FLOOR, CAP, DRIFT = 0.15, 0.3, 1.8, 0.6, 1.6, 0.15
"""settings near which the rows are drawn"""


@dataclass(frozen=True, slots=True)
class RowPlan:
    length: int
    """number of trained tokens"""
    sign: int
    """of the mean advantage"""
    moved: float
    """mean of new - old"""
    stale: float
    """sum of old - behaviour"""
    holes: tuple[int, ...] = ()
    """columns that are not trained"""


PLANS = (
    RowPlan(6, -1, -0.5, 0.2, holes=(2,)), RowPlan(4, 1, -0.5, -0.9),
    RowPlan(7, 1, 0.45, 0.9, holes=(0, 4, 5)), RowPlan(5, -1, 0.45, -0.2), RowPlan(6, 1, 0.03, 0.9),
    RowPlan(4, -1, -0.04, -0.9, holes=(3,)), RowPlan(5, -1, 0.9, 0.2), RowPlan(8, 1, 0.9, 0.1),
    RowPlan(4, -1, -0.305, 0.9),
)  # fmt: skip
NAMES = ("a", "b", "c", "a", "d", "e", "f", "g", "h")
"""trajectories of the rows; the first has two rows, which are not adjacent"""
SPREAD = (-0.5, 0.5, -0.08, 0.08, 0.85, -0.85, 0.25, -0.25)
STALE = (0.8, -0.8, 0.1, -0.1, -0.7, 0.7, -0.3, 0.3)


def drawn_step(draw: int | str, *, since: Since = "stale sampler", **settings: Any) -> LossCase:
    """All rows of a step under these settings."""
    return _rows(draw, since).under(**settings)


@lru_cache(maxsize=64)
def _rows(draw: int | str, since: Since) -> LossCase:
    random = Random(f"step {draw}")
    rows: dict[str, list[list[float]]] = {
        name: [] for name in ("logprobs", "advantages", "old", "behaviour", "reference")
    }
    for plan in PLANS:
        new = [-random.uniform(0.8, 2.5) for _ in range(plan.length)]
        moved = [0.0] * plan.length
        stale = [0.0] * plan.length
        if since in ("later update", "stale sampler"):
            moved = _around(plan.moved, SPREAD, plan.length, random)
        if since in ("stale sampler", "stale first"):
            stale = _around(plan.stale / plan.length, STALE, plan.length, random)
        old = [n - m for n, m in zip(new, moved, strict=True)]
        rows["logprobs"].append(new)
        rows["old"].append(old)
        rows["behaviour"].append([o - s for o, s in zip(old, stale, strict=True)])
        rows["reference"].append([n - random.choice((-1, 1)) * random.uniform(0.1, 0.9) for n in new])
        rows["advantages"].append(_advantages(plan, random))
    return make_case(**rows, trajectory=NAMES, holes=[plan.holes for plan in PLANS])


def _around(mean: float, spread: Sequence[float], length: int, random: Random) -> list[float]:
    """Numbers with about this mean and this spread."""
    apart = [s * random.uniform(0.97, 1.03) for s in spread[:length]]
    return [mean * random.uniform(0.99, 1.01) + s - sum(apart) / length for s in apart]


def _advantages(plan: RowPlan, random: Random) -> list[float]:
    """One advantage per token; every third one has the other sign."""
    return [
        plan.sign * random.uniform(0.4, 0.9) * (-0.5 if place % 3 == 1 else 2.0)
        for place in range(plan.length)
    ]


SettingValues = Mapping[str, Any]
ALL = ("token", "sequence", "constant")
OBJECTIVES: dict[str, tuple[SettingValues, tuple[str, ...]]] = {
    "recipe": ({}, ALL), "recipe, ratio of sequences": ({"objective": "recipe", "ratio": "sequence"}, ALL),
    "grpo": ({}, ALL), "dr_grpo": ({}, ("constant",)), "dapo": ({}, ("token",)), "gspo": ({}, ALL),
    "cispo": ({}, ALL), "rloo": ({}, ALL), "reinforce": ({}, ALL), "ppo": ({}, ALL),
}  # fmt: skip
"""objective -> its fixed settings, and its aggregations"""
UNCLIPPED = ("rloo", "reinforce")
IMPORTANCE: dict[str, SettingValues] = {
    "no weights": {"tis_cap": None},
    "weights that no cap reaches": {"tis_cap": 100.0},
    "truncated weights": {"tis_cap": CAP},
    "masked weights": {"tis_cap": CAP, "tis_mode": "mask", "tis_floor": FLOOR},
    "truncated sequence weights": {"tis_cap": CAP, "tis_level": "sequence"},
    "masked sequence weights": {
        "tis_cap": CAP, "tis_mode": "mask", "tis_floor": FLOOR, "tis_level": "sequence"
    },
}  # fmt: skip
KL: dict[str, SettingValues] = {
    "no KL": {"beta": 0.0},
    **{f"{kl} in the loss": {"beta": 0.3, "kl": kl, "kl_in": "loss"} for kl in ("k1", "k2", "k3", "k3+")},
    **{f"{kl} in the reward": {"beta": 0.3, "kl": kl, "kl_in": "reward"} for kl in ("k1", "k2", "k3")},
}
REJECTION: dict[str, SettingValues] = {"": {}, "rejection": {"reject_drift": DRIFT}}
CLIP: SettingValues = {"clip_low": LOW, "clip_high": HIGH}


def grid(draw: int = 0) -> Iterator[ConformanceCheck]:
    for objective in OBJECTIVES:
        for importance in IMPORTANCE:
            cases = [(importance, *of) for of in _every_other(objective)]
            yield _check(f"{objective}: {importance}", objective, "stale sampler", draw, cases)
        for since in ("first update", "later update", "stale first"):
            weights = ("truncated weights", "masked sequence weights")
            cases = list(
                product(weights, KL, _clips(objective)[-1:], ("rejection",), OBJECTIVES[objective][1])
            )
            yield _check(f"{objective}: {since}", objective, since, draw, cases)


def _every_other(objective: str) -> Iterator[tuple[str, str, str, str]]:
    """Every KL with every pair of the other settings; all combinations if there is one aggregation."""
    axes = tuple(KL), _clips(objective), tuple(REJECTION), OBJECTIVES[objective][1]
    for of in product(*axes):
        if len(axes[-1]) == 1 or sum(axis.index(name) for axis, name in zip(axes, of, strict=True)) % 2 == 0:
            yield of


def _check(
    name: str, objective: str, since: Since, draw: int, cases: list[tuple[str, str, str, str, str]]
) -> ConformanceCheck:
    runs: list[tuple[str, Run]] = [
        (", ".join(filter(None, (since, *of))), partial(_compare, objective, since, draw, of)) for of in cases
    ]
    return ConformanceCheck(criterion=_criterion(cases), name=name, run=runs, where=_where)


def _where(at: list[int]) -> str:
    return f"slope of row {at[0]}, column {at[1] - 1}" if at[1] else "the loss"


def _criterion(cases: list[tuple[str, str, str, str, str]]) -> str:
    return (
        "AC-18" if len({weights for weights, *_ in cases}) == 1 and cases[0][0] != "no weights" else "AC-16"
    )


def _clips(objective: str) -> tuple[str, ...]:
    if objective in UNCLIPPED:
        return ("unclipped",)
    return ("clip",) if objective == "cispo" else ("clip", "dual clip")


def settings_of(objective: str, of: tuple[str, str, str, str, str], random: Random) -> dict[str, Any]:
    """The settings of one combination, with numbers changed at random by up to 3 %."""
    importance, kl, clip, rejection, aggregation = of
    settings: dict[str, Any] = {
        "objective": objective,
        "aggregation": aggregation,
        **OBJECTIVES[objective][0],
    }
    settings |= {**IMPORTANCE[importance], **KL[kl], **REJECTION[rejection]}
    if clip != "unclipped":
        settings |= CLIP
    if clip == "dual clip":
        settings |= {"dual_clip": DUAL}
    moved = {n: v * random.uniform(0.97, 1.03) if isinstance(v, float) else v for n, v in settings.items()}
    if aggregation == "constant":
        moved["constant_length"] = random.randint(5, 50)
    return moved


def _compare(
    objective: str, since: Since, draw: int, of: tuple[str, str, str, str, str], subject: Subject
) -> Compared:
    random = Random(f"{draw} {objective} {since} {of}")
    case = drawn_step(f"{draw} {objective}", since=since, **settings_of(objective, of, random))
    answered = beside(case, subject)
    return by_hand(case), answered


def by_hand(case: LossCase) -> torch.Tensor:
    value, slopes = loss_by_hand(case)
    return torch.tensor([[value, *row] for row in slopes], dtype=torch.float64)


def beside(case: LossCase, subject: Subject) -> torch.Tensor:
    """[B, 1 + T] the loss, and its derivative by each log-prob."""
    value, slopes = case.both(subject.loss)
    return torch.cat([value.reshape(1, 1).expand(len(slopes), 1), slopes], 1)
