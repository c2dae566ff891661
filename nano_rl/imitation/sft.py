"""Supervised fine-tuning (SFT): maximum likelihood on the trained tokens of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from nano_rl.config.training import SftConfig
from nano_rl.learn.config import GuardConfig
from nano_rl.learn.guards import check_step
from nano_rl.learn.model.learner import Learner
from nano_rl.learn.model.logprob import TokenScores, can_share, loss_and_scores
from nano_rl.learn.objectives.loss import sft_loss
from nano_rl.learn.offline import OnStep, run_steps, step_indices
from nano_rl.learn.rows.batch import Batch, make_batches
from nano_rl.learn.rows.sample import TrainSample
from nano_shared.errors import UsageError


def train_sft(
    model: nn.Module, samples: Sequence[TrainSample], config: SftConfig, folder: Path, on_step: OnStep
) -> int:
    """Train in place, continuing from a state saved in `folder`. Returns the total of steps done.

    A step has `config.batch` rows; gradients are accumulated over its micro-batches, and each trained token
    has the same weight. Raises UsageError without rows.
    """
    if not samples:
        raise UsageError("there is nothing to imitate: no row is left; name other tasks, runs or messages")
    total = math.ceil(len(samples) * config.epochs / config.batch)
    learner = Learner(model, config.optimizer, steps=total)

    def do_step(step: int) -> dict[str, float]:
        indices = step_indices(step, size=len(samples), batch=config.batch, seed=config.seed)
        chosen = [samples[i] for i in indices]
        batches = make_batches(chosen, max_tokens=config.max_tokens, trees=can_share(model))
        values = learner.update(batches, _objective, lambda m: check_step(m, GuardConfig()))
        return {**values, "seen": float(sum(len(sample.ids) for sample in chosen))}

    end = min(total, config.stop_after or total)
    return run_steps(learner, do_step, end=end, folder=folder, save_every=config.save_every, on_step=on_step)


def _objective(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    def loss(scores: TokenScores, tokens: Batch) -> tuple[Tensor, dict[str, float]]:
        return sft_loss(scores.logprobs_BT, tokens)

    return loss_and_scores(model, batch, loss, separable=True, entropy=False)
