"""The metrics file of a training: one JSON line per step, truncated to the saved state on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from nano_shared.errors import UsageError

SUCCESS = "success/"
"""prefix of success rates, followed by `all` or `level_N`"""
GRADED = "graded/"
"""prefix of the number of graded rollouts behind a success rate"""
HELD_OUT = "held_out"
"""success on held-out tasks before the step, in steps with a measurement"""
PART = "part/"
"""prefix of the mean score of a reward part, over the rollouts that it scored"""
MetricsRow = dict[str, float | None]
"""the metrics of one step; None for NaN and infinity"""
DASHBOARD = {
    "reward_mean": "reward",
    "frac_zero_std": "frac_reward_zero_std",
    "frac_truncated": "completions/clipped_ratio",
    "kl_reference": "kl",
    "beta": "actor/kl_coef",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "mismatch": "sampling/sampling_logp_difference/mean",
    "mismatch_max": "sampling/sampling_logp_difference/max",
    "weight": "rollout_corr/rollout_is_mean",
    "weight_min": "rollout_corr/rollout_is_min",
    "weight_max": "rollout_corr/rollout_is_max",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "advantage_mean": "critic/advantages/mean",
    "advantage_min": "critic/advantages/min",
    "advantage_max": "critic/advantages/max",
}
"""a metric -> its name in TRL, or in verl where TRL has none; a row holds both"""
MEASURED = ("seconds", "tokens_per_second", "step_time", "perf/")
"""beginnings of the names of metrics that the machine decides: equal trainings differ in these alone"""
SHORTEST = 0.01
"""minimum duration for a throughput, seconds"""
METRICS = "metrics.jsonl"
"""file name in the folder of a training"""


class RowWriter:
    """Appends JSON lines to `path`, one per step. Rows of step `resume_at` and later ones, from a run that
    was killed, are dropped, and so is an incomplete last line. Raises UsageError if the file has rows and
    `resume_at` is None."""

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_at is None:
                raise UsageError(f"{path} holds metrics of another run; resume it or choose another output")
            kept = [row for row in read_rows(path) if (row.get("step") or 0) < resume_at]
            scratch = path.with_name(path.name + ".new")
            with scratch.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        self._file = path.open("a", encoding="utf-8")

    def write_row(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dashboard_names(metrics: Mapping[str, float]) -> dict[str, float]:
    parts = {
        f"rewards/{name.removeprefix(PART)}/mean": v for name, v in metrics.items() if name.startswith(PART)
    }
    return {other: metrics[name] for name, other in DASHBOARD.items() if name in metrics} | parts


class MetricsWriter(RowWriter):
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it. NaN and infinity become null."""
        row: MetricsRow = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.write_row(row)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without an incomplete last line. Raises UsageError for any other line
    that is not JSON."""
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = []
    # the text after the last newline is an incomplete line
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}:{number} is not JSON ({error.msg}); it is not a metrics file"
            ) from error
    return rows


read_metrics = read_rows
