"""Invariances: what must not change a gradient, however a step is cut, ordered, padded or repeated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from nano_rl.conformance.adapter import Subject
from nano_rl.conformance.case import Case, make_case
from nano_rl.conformance.check import Check, Compared

OBJECTIVES = ("recipe", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo")
NEW = [[-0.7, -1.2, -0.4, -0.9], [-2.1, -0.3], [-1.1, -0.2, -1.7]]
OLD = [[-0.6, -1.33, -0.85, -0.9], [-1.2, -0.9], [-1.0, -0.25, -1.6]]
REFERENCE = [[-1.0] * 4, [-1.5] * 2, [-0.5] * 3]
ADVANTAGES = [[1.0] * 4, [-1.5] * 2, [0.5] * 3]


def invariances() -> Iterator[Check]:
    for objective in OBJECTIVES:
        case = step(objective)
        for criterion, name, run in (
            ("AC-10", "cut into micro-batches", _cut),
            ("AC-10", "rows in another order", _order),
            ("AC-10", "every row twice", _twice),
            ("AC-11", "padding of any content", _padding),
            ("AC-12", "a row without trained tokens", _empty_row),
        ):
            yield Check(
                criterion=criterion, name=f"{objective}: {name}", tolerance=1e-12,
                run=partial(run, case),
            )  # fmt: skip
        yield Check(
            criterion="AC-11", name=f"{objective}: nothing trained at all",
            run=partial(_nothing, objective),
        )  # fmt: skip
    yield Check(criterion="AC-14", name="a trajectory in one row or in two", run=_rows_of_a_trajectory)


def step(objective: str, times: int = 1, **more: Any) -> Case:
    return make_case(
        NEW * times,
        ADVANTAGES * times,
        old=OLD * times,
        reference=REFERENCE * times,
        objective=objective,
        **more,
    )


def _cut(case: Case, subject: Subject) -> Compared:
    parts = [case.rows(0).gradient(subject.loss), case.rows(1, 2).gradient(subject.loss)]
    return case.gradient(subject.loss), torch.cat(parts)


def _order(case: Case, subject: Subject) -> Compared:
    turned = case.rows(2, 0, 1).gradient(subject.loss)
    return case.gradient(subject.loss), turned[[1, 2, 0]]


def _twice(case: Case, subject: Subject) -> Compared:
    """Each copy has half of the row's gradient."""
    double = step(case.options["objective"], times=2).gradient(subject.loss)
    return case.gradient(subject.loss), double[:3] + double[3:]


def _padding(case: Case, subject: Subject) -> Compared:
    """Values and gradients: a product of zero and NaN shows in the one and not in the other."""
    wanted = torch.nn.functional.pad(case.gradient(subject.loss), (0, 2))
    value = case.value(subject.loss)
    expected, actual = [], []
    for poison in (0.0, -50.0, math.nan, -math.inf):
        poisoned = case.padded(2, with_value=poison)
        expected += [wanted.flatten(), value.reshape(1)]
        actual += [poisoned.gradient(subject.loss).flatten(), poisoned.value(subject.loss).reshape(1)]
    return torch.cat(expected), torch.cat(actual)


def _empty_row(case: Case, subject: Subject) -> Compared:
    more = make_case(
        [*NEW, []], [*ADVANTAGES, []], old=[*OLD, []], reference=[*REFERENCE, []],
        objective=case.options["objective"],
    )  # fmt: skip
    return torch.cat([case.gradient(subject.loss), torch.zeros(1, 4)]), more.gradient(subject.loss)


def _nothing(objective: str, subject: Subject) -> Compared:
    case = make_case([[], []], [[], []], objective=objective).padded(3, with_value=-1.0)
    return [0.0], [float(case.value(subject.loss))]


def _rows_of_a_trajectory(subject: Subject) -> Compared:
    """Under the mean over sequences: four tokens of one trajectory beside two of another."""
    two: dict[str, Any] = {"aggregation": "sequence"}
    whole = make_case([[-1.0] * 4, [-1.0] * 2], [[1.0] * 4, [1.0] * 2], **two)
    cut = make_case([[-1.0] * 2, [-1.0] * 2, [-1.0] * 2], [[1.0] * 2] * 3, trajectory=["a", "a", "b"], **two)
    return whole.gradient(subject.loss)[0], cut.gradient(subject.loss)[:2].flatten()
