"""Derivatives: the gradient of each objective against central differences of its own loss, in float64.

CISPO, KL k3+ and KL in the reward stop gradients by definition: their slopes are closed forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nano_rl.conformance.adapter import Subject
from nano_rl.conformance.case import Case, make_case
from nano_rl.conformance.check import Check, Compared

STEP = 1e-6
SETTINGS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "grpo with k3": {"objective": "grpo"},
    "grpo with k1": {"objective": "grpo", "kl": "k1"},
    "grpo with k2": {"objective": "grpo", "kl": "k2"},
    "dr_grpo": {"objective": "dr_grpo"},
    "dapo": {"objective": "dapo"},
    "gspo": {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "rloo": {"objective": "rloo"},
    "reinforce": {"objective": "reinforce"},
    "ppo": {"objective": "ppo"},
    "dual clip": {"dual_clip": 1.5},
    "truncated weights": {"tis_cap": 1.1},
    "masked sequence weights": {"tis_cap": 1.1, "tis_mode": "mask", "tis_level": "sequence"},
}


def derivatives() -> Iterator[Check]:
    for name, settings in SETTINGS.items():
        # no ratio stands on a corner of a clip
        case = make_case(
            [[-0.7, -1.2, -0.4], [-2.1, -0.3]],
            [[1.0, -0.5, 2.0], [-1.0, -1.5]],
            old=[[-0.6, -1.33, -0.85], [-1.2, -0.9]],
            behaviour=[[-0.65, -1.3, -1.0], [-1.0, -1.1]],
            reference=[[-1.0] * 3, [-1.0] * 2],
            **settings,
        )
        yield Check(
            criterion="AC-16", name=f"derivative: {name}", tolerance=1e-7,
            run=partial(_compare, case),
        )  # fmt: skip


def _compare(case: Case, subject: Subject) -> Compared:
    differences = torch.zeros_like(case.logprobs)
    for row, column in case.mask.nonzero().tolist():
        ends = []
        for step in (STEP, -STEP):
            moved = case.logprobs.clone()
            moved[row, column] += step
            ends.append(replace(case, logprobs=moved).value(subject.loss))
        differences[row, column] = (ends[0] - ends[1]) / (2 * STEP)
    return differences, case.gradient(subject.loss)
