"""The data of a training, read from its folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_rl.checkpoints.statistics import wilson
from nano_rl.config.training import TrainConfig
from nano_rl.gather.impossible_rollouts import HackRow, hack_row, hack_rows
from nano_rl.gather.success import HELD_OUT_FILE
from nano_rl.learn.metrics import METRICS, MetricsRow, read_metrics, read_rows
from nano_rl.record.training_record import (
    ROLLOUTS,
    Rollout,
    TrainingEvent,
    TrainingRecord,
    read_events,
    read_record,
    read_rollouts,
)
from nano_rl.report.chosen_rollouts import ChosenRollout, choose

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
    return [
        RateRow(name=name, first=first.get(name), last=last.get(name), all=whole[name])
        for name in sorted(whole)
    ]


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
        name=folder.name,
        record=read_record(folder),
        rows=rows,
        events=read_events(folder),
        levels=by_level(steps),
        families=by_family(steps),
        hacks=hack_rows(rows),
        hacks_total=hack_row(rows),
        chosen=choose(steps),
        held_out=read_rows(folder / HELD_OUT_FILE) if (folder / HELD_OUT_FILE).exists() else [],
    )


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
