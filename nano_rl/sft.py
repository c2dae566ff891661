"""Imitation: the warm start. Every epoch sees every trajectory once, in a seeded order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from torch import Tensor, nn

from nano_rl.batch import Batch, make_batches
from nano_rl.config import GuardConfig, SftConfig
from nano_rl.guards import check_step
from nano_rl.learner import Learner
from nano_rl.logprob import can_share, loss_and_scores
from nano_rl.loss import sft_loss
from nano_rl.metrics import METRICS, MetricsWriter
from nano_rl.sample import TrainSample

OnStep = Callable[[int, int, dict[str, float]], None]
"""steps done, steps in all, metrics of the last one"""
STATE = "state.pt"


def train_sft(
    model: nn.Module, samples: Sequence[TrainSample], config: SftConfig, folder: Path, on_step: OnStep
) -> int:
    """Train in place, going on from a state that lies under `folder`. Returns the steps done in all."""
    total = math.ceil(len(samples) * config.epochs / config.batch)
    learner = Learner(model, config.optimizer, steps=total)
    end = min(total, config.stop_after or total)
    state = folder / STATE
    if state.exists():
        learner.load(state)
    with MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
        while learner.step < end:
            started = time.monotonic()
            chosen = [samples[i] for i in _indices(learner.step, len(samples), config)]
            batches = make_batches(chosen, max_tokens=config.max_tokens, trees=can_share(model))
            values = learner.update(batches, _objective, lambda m: check_step(m, GuardConfig()))
            seconds = time.monotonic() - started
            tokens = sum(len(sample.ids) for sample in chosen)
            values |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
            metrics.write(learner.step - 1, values)
            on_step(learner.step, end, values)
            if learner.step % config.save_every == 0 or learner.step == end:
                learner.save(state, {})
    return learner.step


def _objective(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    return loss_and_scores(
        model, batch, lambda scores, batch: sft_loss(scores.logprobs_BT, batch), separable=True, entropy=False
    )


def _indices(step: int, size: int, config: SftConfig) -> list[int]:
    """The samples of one step: a slice of the endless sequence of seeded permutations."""
    wanted = range(step * config.batch, (step + 1) * config.batch)
    orders: dict[int, list[int]] = {}
    for epoch in {position // size for position in wanted}:
        orders[epoch] = list(range(size))
        Random(f"{config.seed} {epoch}").shuffle(orders[epoch])
    return [orders[position // size][position % size] for position in wanted]
