"""Progress of long commands: bars on stderr, tables on stdout; and what imitation, DPO and reward models have
in common from their rows to a checkpoint (`train_offline`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from nano_rl.checkpoints.evaluate import SuccessRow as Row
from nano_rl.command_setup import training_folder, weights_to_train
from nano_rl.config import SftConfig
from nano_rl.gather.rollouts import none_graded, why_ungraded
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.training_record import print_metrics
from nano_shared.command_line import Console
from nano_shared.errors import Interrupted
from nano_shared.types import Trajectory

_LINE_SECONDS = 2.0
"""shortest time between two lines of a bar that goes to no terminal"""


class Bar:
    """One progress bar with a changing remark; lines where stderr is no terminal."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress, self._label = progress, label
        self._task = progress.add_task(label, total=total, remark="")
        self._said = -_LINE_SECONDS

    def advance(self, remark: str = "") -> None:
        self._progress.update(self._task, advance=1, remark=remark)
        self._say()

    def reach(self, done: int, total: int, remark: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, remark=remark)
        self._say()

    def _say(self) -> None:
        task, now = self._progress.tasks[self._task], time.monotonic()
        if self._progress.console.is_terminal or (now - self._said < _LINE_SECONDS and not task.finished):
            return
        self._said = now
        line = f"{self._label} {task.completed:.0f}/{task.total:.0f}  {task.fields['remark']}"
        print(line.rstrip(), file=sys.stderr, flush=True)


LOGGED = ", which are in the log; the same command begins anew"
"""of a bar over runs: what is kept after an interrupt"""


@contextmanager
def bar(label: str, total: int, kept: str = "; the same command begins anew") -> Iterator[Bar]:
    """Raises Interrupted after Ctrl-C; `kept` ends its sentence."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[remark]}", markup=False),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        try:
            yield Bar(progress, label, total)
        except KeyboardInterrupt:
            task = progress.tasks[0]
            raise Interrupted(
                f"{label}: interrupted after {task.completed:.0f} of {task.total:.0f}{kept}"
            ) from None


def print_trained(target: Path, folder: Path, *, as_json: bool) -> None:
    rows = read_metrics(folder / METRICS)
    if as_json:
        last = {name: value for name, value in (rows[-1] if rows else {}).items() if value is not None}
        print(json.dumps({"checkpoint": str(target), "steps": len(rows), "metrics": last}))
        return
    print_metrics(rows)
    print(target)


def tell_ungraded(runs: Sequence[Trajectory]) -> None:
    """Say on stderr how many runs have no reward, and why the first has none.

    Raises PolicyError, or SandboxError where the sandbox failed, if no run has one.
    """
    ungraded = [run for run in runs if run.reward is None]
    if not ungraded:
        return
    if len(ungraded) == len(runs):
        raise none_graded(ungraded)
    reason = why_ungraded(ungraded[0])
    print(f"{len(ungraded)} of {len(runs)} runs could not be graded; the first, {reason}", file=sys.stderr)


def print_rows(rows: list[Row]) -> None:
    table = Table("tasks", "success", "95 % interval", "of", "not graded", box=None)
    for row in rows:
        shown = (f"{row.rate:.1%}", f"{row.low:.1%} to {row.high:.1%}") if row.graded else ("-", "-")
        table.add_row(row.name, *shown, f"{row.successes}/{row.graded}", str(row.ungraded))
    Console().print(table)


def print_components(means: dict[str, float]) -> None:
    table = Table("component", "mean", box=None)
    for name, value in means.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)


if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRows:
    rows: Sequence[Any]
    run_ids: Sequence[str]
    tasks: Sequence[Any]


def train_offline(
    name: str, parent: str, config: SftConfig, device: str | None,
    read: Callable[[OpenedWeights], OfflineRows], train: Callable[..., int], *, label: str,
    shown: Mapping[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Train on rows and write checkpoint `name`. `train` takes the model, the rows, the config, the folder
    and a callback for each step; `shown` maps metrics to their form in the bar."""
    from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
    from nano_rl.learn.learner import prepare

    target, folder = training_folder(name)
    opened = weights_to_train(parent, config.dtype, device, config.quantise)
    found, last = read(opened), dict[str, float]()
    trained = prepare(
        opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip
    with bar(label, 1, "; the same command goes on from the last saved state") as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            last.update(values)
            told = (f"{metric} {values[metric]:{form}}" for metric, form in shown.items())
            progress.reach(done, total, f"{'  '.join(told)}  {values['tokens_per_second']:.0f} tokens/s")

        steps = train(trained, found.rows, config, folder, on_step)
    metrics = {name: last[name] for name in shown if name in last}
    learned = Learned(steps=steps, run_ids=found.run_ids, tasks=found.tasks, metrics=metrics)
    save_checkpoint(target, trained, opened, parent=parent, config=config, learned=learned)
    print_trained(target, folder, as_json=as_json)
