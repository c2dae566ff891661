"""The data of a training, read from its folder, the rollouts that its page points to, and over-optimisation.

A reward is over-optimised where the proxy keeps rising while the gold reward falls. Gold is the share of
rollouts whose tests pass, the proxy is the score of a reward model or judge (Gao et al. 2023, arXiv
2210.10760). Both are averaged over windows of steps to reduce noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from nano_rl.checkpoints.evaluate import wilson
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import HELD_OUT_FILE
from nano_rl.learn.metrics import GRADED, METRICS, PART, SUCCESS, MetricsRow, read_metrics, read_rows
from nano_rl.training_record import (
    ROLLOUTS,
    Rollout,
    TrainingEvent,
    TrainingRecord,
    read_events,
    read_record,
    read_rollouts,
)
from nano_view.report.hacks import HackRow, hack_row, hack_rows

GOLD = f"{SUCCESS}all"
PROXIES = tuple(f"{PART}{name}" for name in ("preference", "judge", "constitution"))
"""reward parts that are opinions about a result"""
_KL = "kl_reference"
_ERRORS = 3.0
"""number of standard errors of a difference of windows that a fall must exceed"""
_LEAST = 0.05
"""smallest fall that is reported, as a share of rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Means over neighbouring steps."""

    step: float
    """the last step"""
    gold: float
    proxy: float
    kl: float | None
    """KL to the reference, nats per token; None if not measured"""
    graded: float
    """number of graded rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverOptimised:
    best: Window
    """the window with the highest gold"""
    last: Window

    @property
    def sentence(self) -> str:
        best, last = self.best, self.last
        known = best.kl is not None and last.kl is not None
        kl = f"; KL {best.kl:.3f}, then {last.kl:.3f} nats a token" if known else ""
        return (
            f"over-optimised: tests passed by {best.gold:.1%} around step {best.step:.0f} and by"
            f" {last.gold:.1%} at the end, while the proxy rose from {best.proxy:.3f} to {last.proxy:.3f}{kl}"
            "; hold the policy with a larger objective.beta, put tests into the reward, or stop earlier"
        )


def proxy_of(rows: Sequence[MetricsRow]) -> str | None:
    """The metric of the proxy in these steps; None if there is none."""
    return next((name for name in PROXIES if any(row.get(name) is not None for row in rows)), None)


def over_optimised(rows: Sequence[MetricsRow]) -> OverOptimised | None:
    """Best and last window if gold fell significantly between them and the proxy rose; else None."""
    windows = gold_and_proxy(rows)
    if len(windows) < 2:
        return None
    best, last = max(windows, key=lambda window: window.gold), windows[-1]
    fall = best.gold - last.gold
    if fall <= max(_LEAST, _ERRORS * math.hypot(_error(best), _error(last))) or last.proxy <= best.proxy:
        return None
    return OverOptimised(best=best, last=last)


def gold_and_proxy(rows: Sequence[MetricsRow]) -> list[Window]:
    """Sliding windows of a tenth of the steps, at least three; empty if gold or proxy was not measured."""
    proxy = proxy_of(rows)
    known = [r for r in rows if proxy and r.get(GOLD) is not None and r.get(proxy) is not None]
    size = max(3, len(known) // 10)
    return [_window(known[end - size : end], str(proxy)) for end in range(size, len(known) + 1)]


def _window(rows: Sequence[MetricsRow], proxy: str) -> Window:
    def average(name: str) -> float | None:
        values = [value for row in rows if (value := row.get(name)) is not None]
        return math.fsum(values) / len(values) if values else None

    graded = math.fsum(row.get(f"{GRADED}all") or 0.0 for row in rows)
    return Window(
        step=rows[-1].get("step") or 0.0, gold=average(GOLD) or 0.0, proxy=average(proxy) or 0.0,
        kl=average(_KL), graded=graded,
    )  # fmt: skip


def _error(window: Window) -> float:
    """Standard error of a share, with one success and one failure added so that it is never 0."""
    count = window.graded + 2
    share = (window.gold * window.graded + 1) / count
    return math.sqrt(share * (1 - share) / count)


@dataclass(frozen=True, slots=True)
class ChosenRollout:
    why: str
    step: int
    rollout: Rollout


def choose(steps: Mapping[int, Sequence[Rollout]], *, seed: int = 0) -> list[ChosenRollout]:
    """At most eight different rollouts: best, worst and a random one of the first and of the last step with a
    graded rollout, the last rollout with tampering, and the last passed impossible control. Ties are broken
    by `seed`."""
    fits: Callable[[Rollout], bool] = lambda run: run.reward is not None and not run.control  # noqa: E731
    graded = {step: list(filter(fits, runs)) for step, runs in steps.items()}
    order = [step for step in sorted(graded) if graded[step]]
    chosen: list[ChosenRollout] = []

    def take(why: str, step: int, runs: Sequence[Rollout], best: bool | None = None) -> None:
        left = [run for run in runs if run.id not in {c.rollout.id for c in chosen}]
        if not left:
            return
        if best is not None:
            wanted = (max if best else min)(run.reward or 0.0 for run in left)
            left = [run for run in left if (run.reward or 0.0) == wanted]
        chosen.append(ChosenRollout(why, step, Random(f"{seed} {why}").choice(left)))

    ends = dict.fromkeys((*order[:1], *order[-1:]))
    for where, step in zip(("beginning", "end"), ends, strict=False):
        take(f"Best at the {where}", step, graded[step], best=True)
        take(f"Worst at the {where}", step, graded[step], best=False)
        take(f"Random at the {where}", step, graded[step])
    kinds: tuple[tuple[str, Callable[[Rollout], bool]], ...] = (
        ("Tampering was found", lambda r: r.tampered and not r.control),
        ("An impossible control was passed", lambda r: r.control and r.tampered),
    )
    for why, is_hack in kinds:
        for step in sorted(steps, reverse=True):
            hacks = [run for run in steps[step] if is_hack(run)]
            if hacks:
                take(why, step, hacks)
                break
    return chosen


PARTS = 4
"""the first and the last quarter of the steps are compared"""


@dataclass(frozen=True, slots=True)
class Rate:
    successes: int
    graded: int

    @property
    def rate(self) -> float:
        return self.successes / self.graded

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.successes, self.graded)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """Success rates of one level or family, in the first and last steps; None if nothing was graded."""

    name: str
    first: Rate | None
    last: Rate | None
    all: Rate


def by_level(steps: Mapping[int, Sequence[Rollout]]) -> list[RateRow]:
    return _parts(steps, lambda run: None if run.level is None else f"level {run.level}")


def by_family(steps: Mapping[int, Sequence[Rollout]]) -> list[RateRow]:
    return _parts(steps, lambda run: run.family)


def _parts(steps: Mapping[int, Sequence[Rollout]], name_of: Callable[[Rollout], str | None]) -> list[RateRow]:
    order = sorted(steps)
    size = max(1, len(order) // PARTS)
    first, last, whole = (_rates(steps, at, name_of) for at in (order[:size], order[-size:], order))
    rows = ((name, first.get(name), last.get(name), whole[name]) for name in sorted(whole))
    return [RateRow(name=name, first=first, last=last, all=every) for name, first, last, every in rows]


def _rates(
    steps: Mapping[int, Sequence[Rollout]], chosen: Sequence[int], name_of: Callable[[Rollout], str | None]
) -> dict[str, Rate]:
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for step in chosen:
        for run in steps[step]:
            name = name_of(run)
            if name is not None and run.success is not None and not run.control:
                outcomes[name].append(run.success)
    return {name: Rate(sum(passed), len(passed)) for name, passed in outcomes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The data of a training; parts that earlier versions did not write are empty."""

    name: str
    record: TrainingRecord | None
    rows: list[MetricsRow]
    """metrics, one row per step; at least one"""
    events: list[TrainingEvent]
    levels: list[RateRow]
    families: list[RateRow]
    hacks: list[HackRow]
    hacks_total: HackRow
    chosen: list[ChosenRollout]
    """rollouts of the first and the last step, and hacks"""
    held_out: list[MetricsRow]
    """success on held-out tasks, a row a measurement (`gather/success.py`); empty without --held-out"""

    @property
    def settings(self) -> list[tuple[str, list[tuple[str, str, bool]]]]:
        """(section, [(name, value, True if not the default)]) of the settings."""
        if self.record is None:
            return []
        defaults = TrainConfig().model_dump(mode="json")
        sections: dict[str, list[tuple[str, str, bool]]] = {"": []}
        for name, value in self.record.config.items():
            default = defaults.get(name)
            if isinstance(value, dict):
                before = default if isinstance(default, Mapping) else {}
                sections[name] = [(n, _text(v), v != before.get(n)) for n, v in value.items()]
            else:
                sections[""].append((name, _text(value), value != default))
        return list(sections.items())


def read_training(folder: Path) -> Training:
    """Read the training in `folder`. Raises UsageError for a file that is none of a training."""
    rows = read_metrics(folder / METRICS)
    steps = read_rollouts(folder / ROLLOUTS)
    return Training(
        name=folder.name, record=read_record(folder), rows=rows, events=read_events(folder),
        levels=by_level(steps), families=by_family(steps), hacks=hack_rows(rows), hacks_total=hack_row(rows),
        chosen=choose(steps),
        held_out=read_rows(folder / HELD_OUT_FILE) if (folder / HELD_OUT_FILE).exists() else [],
    )  # fmt: skip


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
