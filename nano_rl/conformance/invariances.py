"""Invariances: what must not change a gradient, however a step is cut, ordered, padded or repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from nano_rl.conformance.adapter import Subject
from nano_rl.conformance.case import TENSORS, Case, Check, Compared, Run, make_case
from nano_rl.conformance.grid import drawn_step

OBJECTIVES = ("recipe", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo")
SETTINGS: dict[str, Mapping[str, Any]] = {
    "as its paper has it": {},
    "sequence weights, rejection": {"tis_cap": 1.6, "tis_level": "sequence", "reject_drift": 0.15},
    "masked weights, KL in the loss": {
        "tis_cap": 1.6, "tis_mode": "mask", "beta": 0.3, "kl": "k3", "kl_in": "loss"
    },
    "KL in the reward": {"beta": 0.3, "kl": "k1", "kl_in": "reward"},
}  # fmt: skip
"""each of which something in a row, or in the step, may get hold of another row's"""
Changed = Callable[[Case, Subject, Random], Compared]


def invariances(draw: int = 0) -> Iterator[Check]:
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
            yield Check(criterion=criterion, name=f"{objective}: {name}", tolerance=1e-12, run=runs)
    yield Check(criterion="AC-14", name="a trajectory in one row or in two", run=_rows_of_a_trajectory)


def _run(change: Changed, draw: int, objective: str, settings: str, subject: Subject) -> Compared:
    name = f"{draw} {objective} {settings}"
    return change(drawn_step(name, objective=objective, **SETTINGS[settings]), subject, Random(name))


def _cut(case: Case, subject: Subject, random: Random) -> Compared:
    """Two to four micro-batches of any rows, in any order."""
    rows = list(range(len(case.mask)))
    random.shuffle(rows)
    cuts = sorted(random.sample(range(1, len(rows)), random.randint(1, 3)))
    gradient = torch.zeros_like(case.logprobs)
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        gradient[rows[start:stop]] = case.rows(*rows[start:stop]).gradient(subject.loss)
    return case.gradient(subject.loss), gradient


def _order(case: Case, subject: Subject, random: Random) -> Compared:
    order = list(range(len(case.mask)))
    random.shuffle(order)
    gradient = torch.zeros_like(case.logprobs)
    gradient[order] = case.rows(*order).gradient(subject.loss)
    return case.gradient(subject.loss), gradient


def _twice(case: Case, subject: Subject, random: Random) -> Compared:
    """Each copy has half of the row's gradient."""
    of = case.options
    options = {
        **of,
        "num_tokens": 2 * of["num_tokens"],
        "num_sequences": 2 * of["num_sequences"],
        "trajectory": [*of["trajectory"], *(f"again {name}" for name in of["trajectory"])],
        "trajectory_tokens": of["trajectory_tokens"] * 2,
    }
    double = Case(**{n: torch.cat([getattr(case, n)] * 2) for n in TENSORS}, options=options)
    first, second = double.gradient(subject.loss).chunk(2)
    return case.gradient(subject.loss).repeat(2, 1), 2 * torch.cat([first, second])


def _padding(case: Case, subject: Subject, random: Random) -> Compared:
    """Values and gradients: a product of zero and NaN shows in the one and not in the other."""
    wanted = torch.nn.functional.pad(case.gradient(subject.loss), (0, 2))
    value = case.value(subject.loss)
    expected, actual = [], []
    for poison in (0.0, -50.0, math.nan, -math.inf, math.inf):
        poisoned = case.padded(2, with_value=poison)
        expected += [wanted.flatten(), value.reshape(1)]
        actual += [poisoned.gradient(subject.loss).flatten(), poisoned.value(subject.loss).reshape(1)]
    return torch.cat(expected), torch.cat(actual)


def _empty_row(case: Case, subject: Subject, random: Random) -> Compared:
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


def _nothing(case: Case, subject: Subject, random: Random) -> Compared:
    """A step of rows without trained tokens, and a micro-batch of such rows in a step that has others."""
    nothing = torch.zeros_like(case.mask)
    names = [f"without {place}" for place in range(len(nothing))]
    beside = {**case.options, "trajectory": names, "trajectory_tokens": [0] * len(names)}
    alone = {**beside, "num_tokens": 0, "num_sequences": 0}
    values = [
        float(replace(case, mask=nothing, options=options).value(subject.loss)) for options in (beside, alone)
    ]
    return [0.0, 0.0], values


def _rows_of_a_trajectory(subject: Subject) -> Compared:
    """Under the mean over sequences: eight tokens of one trajectory beside four of another."""
    two: dict[str, Any] = {"aggregation": "sequence"}
    whole = make_case([[-1.0] * 8, [-1.0] * 4], [[1.0] * 8, [1.0] * 4], **two)
    cut = make_case([[-1.0] * 4] * 3, [[1.0] * 4] * 3, trajectory=["a", "a", "b"], **two)
    return whole.gradient(subject.loss)[0], cut.gradient(subject.loss)[:2].flatten()
