"""Success on held-out tasks while a training runs: before it, some ten times on the way, and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_coder.run.execution import Runtime
from nano_rl.checkpoints.evaluate import row_of
from nano_rl.gather.rollouts import collect
from nano_rl.learn.metrics import HELD_OUT, RowWriter
from nano_shared.errors import UsageError
from nano_shared.types import Task

HELD_OUT_FILE = "held_out.jsonl"
"""the file's name in the folder of a training"""
_MEASUREMENTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Tasks that a training is measured on and never learns from, and the file the measurements go to."""

    tasks: tuple[Task, ...]
    folder: Path
    """of the training"""
    seed: int

    def refuse_trained(self, trained: Sequence[Task]) -> None:
        """Raises UsageError where a held-out task is also trained on."""
        both = {task.id for task in self.tasks} & {task.id for task in trained}
        if both:
            raise UsageError(
                f"{len(both)} of the {len(self.tasks)} held-out tasks are among those trained on; make them"
                " with --split test"
            )

    def due(self, step: int, steps: int) -> bool:
        """Whether the weights after `step` updates are measured."""
        return step == steps or step % max(1, steps // _MEASUREMENTS) == 0

    def measure(self, live: Runtime, step: int) -> dict[str, float]:
        """Roll out each task once from the weights after `step` updates; returns the metric `held_out`.

        Each measurement has the same seeds and is kept as a row of the file. Rows of this step and of later
        ones, which a killed process left, are dropped.
        """
        runs = collect(self.tasks, live, seed=self.seed)
        found = row_of("all", runs)
        if not found.graded:
            return {}
        interval = {"low": found.low, "high": found.high}
        row = {"step": step, "success": found.rate, "graded": found.graded, **interval}
        with RowWriter(self.folder / HELD_OUT_FILE, resume_at=step) as rows:
            rows.write_row(row)
        return {HELD_OUT: found.rate}
