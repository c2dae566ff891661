"""Reward models: the Bradley-Terry model of preferences between runs, trained on the policy's backbone.

    P(chosen preferred) = sigmoid(r(chosen) - r(rejected))      loss = mean over pairs of -log P

Bradley and Terry 1952, as in Ouyang et al. 2022 (arXiv 2203.02155). r is a linear head in float32 on the last
token of a run's last row, so that it reads the same tokens as the policy. Left out: margins, several heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from nano_preferences.config import RewardModelConfig
from nano_preferences.critic import ScalarModel, by_budget, padded
from nano_preferences.pairs import PairRows
from nano_rl.learn.learner import Learner
from nano_rl.train_fixed_rows import OnStep, train_rows, usual_guards
from nano_shared.errors import UsageError

BINS = 5
"""number of calibration bins between a confidence of 0.5 and 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Held-out pairs of similar confidence."""

    low: float
    high: float
    pairs: int
    confidence: float
    """mean probability of the side that the model prefers"""
    accuracy: float
    """share of pairs in which that side is the chosen one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelReport:
    """Accuracy and calibration of a reward model on held-out pairs."""

    pairs: int
    accuracy: float
    """a tie counts 0.5"""
    log_loss: float
    """nats per pair; log 2 = 0.693 by chance"""
    calibration_error: float
    """expected calibration error: mean |confidence - accuracy| over the bins, weighted by their pairs"""
    bins: tuple[Bin, ...]

    def metrics(self) -> dict[str, float]:
        names = ("pairs", "accuracy", "log_loss", "calibration_error")
        return {f"held_out_{name}": float(getattr(self, name)) for name in names}


def train_reward_model(
    model: ScalarModel, pairs: Sequence[PairRows], config: RewardModelConfig, folder: Path, on_step: OnStep
) -> int:
    """Train in place, continuing from a state saved in `folder`. Returns the total of steps done. Each step
    reports `accuracy` and `margin`, means over its pairs."""

    def do_step(learner: Learner, indices: Sequence[int]) -> dict[str, float]:
        chosen = [pairs[i] for i in indices]
        margins: list[float] = []

        def objective(module: nn.Module, part: Sequence[PairRows]) -> tuple[Tensor, dict[str, float]]:
            margin_P = pair_margins(module, part)
            loss = bradley_terry(margin_P).sum() / len(chosen)
            margins.extend(margin_P.tolist())
            return loss, {"loss": loss.item()}

        values = learner.update(_parts(chosen, config.max_tokens), objective, usual_guards)
        seen = sum(len(row.ids) for pair in chosen for row in (pair.chosen[-1], pair.rejected[-1]))
        accuracy, margin = sum(m > 0 for m in margins) / len(margins), math.fsum(margins) / len(margins)
        return {**values, "accuracy": accuracy, "margin": margin, "seen": float(seen)}

    rows = [(*pair.chosen, *pair.rejected) for pair in pairs]
    return train_rows(model, rows, config, folder, on_step, do_step)


def bradley_terry(margin_P: Tensor) -> Tensor:
    """[P] the loss of each pair from r(chosen) - r(rejected)."""
    return -logsigmoid(margin_P)


def pair_margins(model: nn.Module, pairs: Sequence[PairRows]) -> Tensor:
    """[P] r(chosen) - r(rejected)."""
    rows = [pair.chosen[-1].ids for pair in pairs] + [pair.rejected[-1].ids for pair in pairs]
    worth_2P = row_scores(model, rows)
    return worth_2P[: len(pairs)] - worth_2P[len(pairs) :]


def row_scores(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """[B] the score at the last token of each row."""
    device = next(model.parameters()).device
    ids_BT = padded(rows, torch.int64).to(device)
    attention_BT = padded([[1] * len(row) for row in rows], torch.int64).to(device)
    worth_BT: Tensor = model(ids_BT, attention_BT)
    last_B = attention_BT.sum(dim=1) - 1
    return worth_BT.gather(1, last_B[:, None]).squeeze(1)


@torch.no_grad()
def measure(model: nn.Module, pairs: Sequence[PairRows], *, max_tokens: int) -> RewardModelReport:
    """Accuracy and calibration on pairs. Raises ValueError if there are none."""
    if not pairs:
        raise ValueError("no pair to measure on")
    margins = [m for part in _parts(pairs, max_tokens) for m in pair_margins(model, part).tolist()]
    bins, losses = _bins(margins), bradley_terry(torch.tensor(margins, dtype=torch.float64)).tolist()
    error = sum(b.pairs * abs(b.confidence - b.accuracy) for b in bins) / len(margins)
    return RewardModelReport(
        pairs=len(margins), accuracy=_accuracy(margins), log_loss=math.fsum(losses) / len(margins),
        calibration_error=error, bins=bins,
    )  # fmt: skip


def held_out(pairs: Sequence[PairRows], share: float, seed: int) -> tuple[list[PairRows], list[PairRows]]:
    """(training pairs, held-out pairs), split by prompt. Raises UsageError for a single prompt."""
    keys = sorted({pair.prompt_key for pair in pairs})
    if len(keys) < 2:
        raise UsageError(
            f"all {len(pairs)} pairs are on one prompt, so none could be held out to measure on; add pairs on"
            " other tasks"
        )
    Random(f"held out {seed}").shuffle(keys)
    kept = set(keys[: min(max(1, round(share * len(keys))), len(keys) - 1)])
    train = [pair for pair in pairs if pair.prompt_key not in kept]
    return train, [pair for pair in pairs if pair.prompt_key in kept]


def _parts(pairs: Sequence[PairRows], max_tokens: int) -> list[list[PairRows]]:
    lengths = [2 * max(len(pair.chosen[-1].ids), len(pair.rejected[-1].ids)) for pair in pairs]
    return [[pairs[i] for i in part] for part in by_budget(lengths, max_tokens)]


def _bins(margins: Sequence[float]) -> tuple[Bin, ...]:
    width = 0.5 / BINS
    sure: list[list[tuple[float, float]]] = [[] for _ in range(BINS)]
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(abs(margin), 700.0)))
        sure[min(int((confidence - 0.5) / width), BINS - 1)].append((confidence, margin))
    return tuple(
        Bin(
            low=0.5 + i * width, high=0.5 + (i + 1) * width, pairs=len(members),
            confidence=math.fsum(c for c, _ in members) / len(members),
            accuracy=_accuracy([m for _, m in members]),
        )
        for i, members in enumerate(sure) if members
    )  # fmt: skip


def _accuracy(margins: Sequence[float]) -> float:
    return math.fsum(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins) / len(margins)
