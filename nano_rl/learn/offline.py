"""The loop of a training on a fixed set of rows: imitation, DPO, reward models. Resumes where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_rl.learn.model.learner import Learner


def step_indices(step: int, *, size: int, batch: int, seed: int) -> list[int]:
    """[batch] the rows of one step, of `size` rows: every epoch sees each once, in an order of its own.

    A function of its arguments alone, so that a resumed training goes on where it was.
    """
    wanted = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {position // size for position in wanted}:
        orders[epoch] = list(range(size))
        Random(f"{seed} {epoch}").shuffle(orders[epoch])
    return [orders[position // size][position % size] for position in wanted]


OnStep = Callable[[int, int, dict[str, float]], None]
"""steps done, steps in all, metrics of the last one"""
DoStep = Callable[[int], dict[str, float]]
"""the update of a step, by its number from 0; its metrics, with `seen`, the tokens that it read"""
STATE = "state.pt"


def run_steps(
    learner: Learner, do_step: DoStep, *, end: int, folder: Path, save_every: int, on_step: OnStep
) -> int:
    """Update until `end`, going on from a state that lies under `folder`. Returns the steps done in all.

    The metrics of each step get `seconds` and `tokens_per_second`.
    """
    state = folder / STATE
    if state.exists():
        learner.load(state)
    with MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
        while learner.step < end:
            started = time.monotonic()
            values = do_step(learner.step)
            seconds = time.monotonic() - started
            values |= {"seconds": seconds, "tokens_per_second": values.pop("seen") / max(seconds, 1e-9)}
            metrics.write(learner.step - 1, values)
            on_step(learner.step, end, values)
            if learner.step % save_every == 0 or learner.step == end:
                learner.save(state, {})
    return learner.step
