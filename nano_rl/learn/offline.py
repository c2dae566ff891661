"""The training loop over a fixed set of rows: imitation, DPO, reward models. Resumes from its saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from torch import nn

from nano_rl.learn.config import GuardConfig, OfflineConfig
from nano_rl.learn.guards import check_step
from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_rl.learn.model.learner import Learner


def step_indices(step: int, *, size: int, batch: int, seed: int) -> list[int]:
    """[batch] indices of the rows of one step: each epoch has each of `size` rows once, shuffled by its
    number.

    A pure function, so that a resumed training continues with the same rows.
    """
    wanted = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {position // size for position in wanted}:
        orders[epoch] = list(range(size))
        Random(f"{seed} {epoch}").shuffle(orders[epoch])
    return [orders[position // size][position % size] for position in wanted]


OnStep = Callable[[int, int, dict[str, float]], None]
"""called after each step: steps done, total steps, metrics of the step"""
DoStep = Callable[[Learner, list[int]], dict[str, float]]
"""updates for the rows of a step, by index; returns metrics, with the number of tokens read as `seen`"""
STATE = "state.pt"


def usual_guards(metrics: dict[str, float]) -> None:
    """The guards with their defaults. Raises GuardTripped."""
    check_step(metrics, GuardConfig())


def train_rows(
    model: nn.Module,
    size: int,
    config: OfflineConfig,
    folder: Path,
    on_step: OnStep,
    do_step: DoStep,
    *,
    stop_after: int | None = None,
) -> int:
    """Train on `size` rows, continuing from a state saved in `folder`. Returns the total of steps done.

    Adds `seconds` and `tokens_per_second` to the metrics of each step. `stop_after` ends a training short of
    the schedule of its learning rate.
    """
    total = math.ceil(size * config.epochs / config.batch)
    end = min(total, stop_after or total)
    learner = Learner(model, config.optimizer, steps=total)
    state = folder / STATE
    if state.exists():
        learner.load(state)
    with MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
        while learner.step < end:
            started = time.monotonic()
            values = do_step(
                learner, step_indices(learner.step, size=size, batch=config.batch, seed=config.seed)
            )
            seconds = time.monotonic() - started
            values |= {"seconds": seconds, "tokens_per_second": values.pop("seen") / max(seconds, 1e-9)}
            metrics.write(learner.step - 1, values)
            on_step(learner.step, end, values)
            if learner.step % config.save_every == 0 or learner.step == end:
                learner.save(state, {})
    return learner.step
