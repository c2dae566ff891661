"""Imitation: the warm start. Every epoch sees every trajectory once, in a seeded order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch

from nano_rl.batch import Batch, make_batches
from nano_rl.config import SftConfig
from nano_rl.learner import Learner
from nano_rl.logprob import token_logprobs
from nano_rl.loss import sft_loss
from nano_rl.metrics import MetricsWriter
from nano_rl.sample import TrainSample

OnStep = Callable[[int, int, dict[str, float]], None]
STATE = "state.pt"


def train_sft(
    model: torch.nn.Module, samples: Sequence[TrainSample], config: SftConfig, folder: Path, on_step: OnStep
) -> int:
    """Train in place, saving the state under `folder`; goes on from a state that lies there. Returns the steps."""
    total = math.ceil(len(samples) * config.epochs / config.batch)
    learner = Learner(
        model,
        learning_rate=config.learning_rate,
        warmup=config.warmup,
        total_steps=total,
        weight_decay=config.weight_decay,
        grad_clip=config.grad_clip,
        autocast=config.dtype == "bfloat16",
    )
    state = folder / STATE
    if state.exists():
        learner.load(state)
    metrics = MetricsWriter(folder / "metrics.jsonl", from_step=learner.step)
    while learner.step < total:
        started = time.monotonic()
        step = learner.step
        chosen = [samples[i] for i in _indices(step, len(samples), config)]
        values = learner.update(make_batches(chosen, max_tokens=config.max_tokens), _objective)
        seconds = time.monotonic() - started
        tokens = sum(len(sample.ids) for sample in chosen)
        values |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
        metrics.write(step, values)
        on_step(learner.step, total, values)
        if learner.step % config.save_every == 0 or learner.step == total:
            learner.save(state, {})
    return learner.step


def _objective(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    return sft_loss(token_logprobs(model, batch), batch)


def _indices(step: int, size: int, config: SftConfig) -> list[int]:
    """The samples of one step: a slice of the endless sequence of seeded permutations."""
    wanted = range(step * config.batch, (step + 1) * config.batch)
    orders: dict[int, list[int]] = {}
    for epoch in {position // size for position in wanted}:
        order = list(range(size))
        Random(config.seed * 1_000_003 + epoch).shuffle(order)
        orders[epoch] = order
    return [orders[position // size][position % size] for position in wanted]
