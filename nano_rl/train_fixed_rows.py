"""The training loop over a fixed set of rows: imitation, DPO, reward models. Resumes from its saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from nano_rl.learn.config import GuardConfig, OfflineConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.guards import check_step
from nano_rl.learn.learner import Learner
from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_rl.resume import (
    STATES,
    States,
    TrainingStopped,
    changed_settings,
    flat_settings,
    interruptible,
)
from nano_shared.errors import UsageError
from nano_shared.files import content_hash


def step_indices(step: int, *, size: int, batch: int, seed: int) -> list[int]:
    """[batch] indices of the rows of one step: each epoch has each of `size` rows once, shuffled by its
    number. A pure function, so that a resumed training continues with the same rows."""
    wanted = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {position // size for position in wanted}:
        orders[epoch] = list(range(size))
        Random(f"{seed} {epoch}").shuffle(orders[epoch])
    return [orders[position // size][position % size] for position in wanted]


class OtherRows(UsageError):
    """The saved state is of a training on other rows."""


OnStep = Callable[[int, int, dict[str, float]], None]
"""called after each step: steps done, total steps, metrics of the step"""
DoStep = Callable[[Learner, list[int]], dict[str, float]]
"""updates for the rows of a step, by index; returns metrics, with the number of tokens read as `seen`"""
FREE = {"save_every", "max_tokens", "stop_after", "gradient_checkpointing"}
"""settings that may differ when a training goes on"""


def usual_guards(metrics: dict[str, float]) -> None:
    check_step(metrics, GuardConfig())


def train_rows(
    model: nn.Module, rows: Sequence[Sequence[TrainSample]], config: OfflineConfig, folder: Path,
    on_step: OnStep, do_step: DoStep, *, until: float | None = None,
) -> int:  # fmt: skip
    """Train on rows, each of one sample or of a pair's, continuing from a state saved in `folder`.

    Returns the total of steps done. Adds `seconds` and `tokens_per_second` to the metrics of each step.
    `config.stop_after` ends a training short of the schedule of its learning rate; `until`, a time of
    `time.monotonic`, shortens the schedule to what the pace of the steps allows (budgeted training, Li et al.
    2020, arXiv:1905.04753). Raises UsageError for a state of
    other settings or weights, OtherRows for one of other rows, TrainingStopped after a signal.
    """
    size = len(rows)
    total = math.ceil(size * config.epochs / config.batch)
    end = min(total, config.stop_after or total)
    identity = _identity(model, rows, config)
    learner = Learner(model, config.optimizer, steps=total)
    with States(folder / STATES, keep=1).claimed() as states, interruptible() as interrupt:
        if saved := states.steps():
            manifest, state = states.read(saved[-1])
            _refuse_other(manifest.identity, identity, folder)
            learner.restore(state)
        begun, resumed = time.monotonic(), learner.step
        with MetricsWriter(folder / METRICS, resume_at=learner.step) as metrics:
            while learner.step < end:
                started, step = time.monotonic(), learner.step
                states.join()
                indices = step_indices(step, size=size, batch=config.batch, seed=config.seed)
                values = do_step(learner, indices)
                now = time.monotonic()
                seconds = now - started
                if until is not None:
                    fit = int((until - now) / (now - begun) * (learner.step - resumed))
                    end = learner.steps = min(end, learner.step + max(0, fit))
                values |= {"seconds": seconds, "tokens_per_second": values.pop("seen") / max(seconds, 1e-9)}
                metrics.write(step, values)
                on_step(learner.step, end, values)
                if learner.step % config.save_every == 0 or learner.step == end or interrupt.requested:
                    states.save(learner.step, learner.state(), identity)
                if interrupt.requested and learner.step < end:
                    raise TrainingStopped(learner.step, end, folder)
    return learner.step


def _identity(
    model: nn.Module, rows: Sequence[Sequence[TrainSample]], config: OfflineConfig
) -> dict[str, Any]:
    """What a saved state must have in common with a training that goes on from it."""
    beginning = {
        name: [list(p.shape), p.detach().flatten()[:64].tolist()] for name, p in model.named_parameters()
    }
    return {
        "rows": content_hash([[[row.ids, row.mask] for row in samples] for samples in rows]),
        "weights": content_hash(beginning),
        "settings": config.model_dump(mode="json", exclude=FREE),
    }


def _refuse_other(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    anew = "give the same, or start anew under another --name"
    if saved["weights"] != now["weights"]:
        raise UsageError(f"the training in {folder} began from another model; {anew}")
    if saved["rows"] != now["rows"]:
        raise OtherRows(f"the training in {folder} began with other rows, or in another order; {anew}")
    if changed := changed_settings(flat_settings(saved["settings"]), flat_settings(now["settings"])):
        listed = ", ".join(changed.values())
        raise UsageError(f"the training in {folder} was saved with other settings: {listed}; {anew}")
