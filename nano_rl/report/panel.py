"""What is worth seeing of a training: metrics by panel, how each is written, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nano_rl.checkpoints.statistics import Z95, wilson
from nano_rl.learn.metrics import GRADED, HELD_OUT, SUCCESS, Row

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOISE = 1e-6
"""relative spread that is drawn flat: the last digits of a constant are no course"""


def sparkline(values: Sequence[float | None], *, width: int = 24) -> str:
    """The last `width` values between their least and greatest; a blank where there is no finite number."""
    shown = [v if v is not None and math.isfinite(v) else None for v in values[-width:]]
    known = [v for v in shown if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    if high / 2 - low / 2 <= _NOISE * max(abs(high), abs(low)):
        return "".join(" " if v is None else _BLOCKS[0] for v in shown)
    # halved before subtracting, so that the span of huge numbers stays finite
    span = high / 2 - low / 2
    top = len(_BLOCKS) - 1
    return "".join(" " if v is None else _BLOCKS[round((v / 2 - low / 2) / span * top)] for v in shown)


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a panel."""

    metric: str
    label: str
    form: str = ".4g"


PANELS: dict[str, tuple[Line, ...]] = {
    "Reward": (
        Line("reward_mean", "reward", ".3f"),
        Line(f"{SUCCESS}all", "success", ".1%"),
        Line(HELD_OUT, "held-out success", ".1%"),
        Line("frac_zero_std", "groups without signal", ".1%"),
        Line("frac_unscored", "rollouts not graded", ".1%"),
        Line("tampered", "tampered rollouts", ".0f"),
        Line("curriculum_level", "open level", ".0f"),
    ),
    "Objective": (
        Line("loss", "loss"),
        Line("entropy", "entropy", ".3f"),
        Line("kl_reference", "KL to the start"),
        Line("approx_kl", "KL of the update"),
        Line("clip_low", "clipped low", ".2%"),
        Line("clip_high", "clipped high", ".2%"),
        Line("ratio_deviation", "ratio away from 1"),
        Line("grad_norm", "gradient norm"),
        Line("ess", "effective samples", ".1%"),
        Line("mismatch", "sampler - trainer"),
        Line("stale", "stale tokens", ".1%"),
        Line("learning_rate", "learning rate", ".2g"),
    ),
    "Time": (
        Line("tokens_per_second_rollout", "rollout tokens/s", ".0f"),
        Line("tokens_per_second_generate", "  generate tokens/s", ".0f"),
        Line("tokens_per_second_sandbox", "  sandbox tokens/s", ".0f"),
        Line("tokens_per_second_train", "training tokens/s", ".0f"),
        Line("seconds_rollout", "rollout s", ".2f"),
        Line("seconds_generate", "  generate s", ".2f"),
        Line("seconds_sandbox", "  sandbox s", ".2f"),
        Line("seconds_grade", "  grading s", ".2f"),
        Line("seconds_train", "training s", ".2f"),
        Line("seconds_save", "saving s", ".2f"),
    ),
}
"""heading -> the metrics under it; those that a training does not report are left out"""


def level_lines(row: Mapping[str, float | None]) -> tuple[Line, ...]:
    """A line for the success at each level that a step had."""
    levels = sorted(int(n.rpartition("_")[2]) for n in row if n.startswith(f"{SUCCESS}level_"))
    return tuple(Line(f"{SUCCESS}level_{n}", f"  level {n}", ".1%") for n in levels)


def written(line: Line, row: Mapping[str, float | None]) -> str:
    value = row.get(line.metric)
    return "-" if value is None else format(value, line.form)


def band(line: Line, row: Mapping[str, float | None]) -> str:
    """The 95 % interval of a mean reward or a success rate; empty for all else."""
    interval = interval_of(line.metric, row)
    return "" if interval is None else "{} to {}".format(*(format(end, line.form) for end in interval))


def interval_of(metric: str, row: Mapping[str, float | None]) -> tuple[float, float] | None:
    """The 95 % interval of the value of one step, where the step tells enough for one."""
    value = row.get(metric)
    if value is None:
        return None
    error = row.get("reward_error")
    if metric == "reward_mean" and error is not None:
        least, most = min(0.0, row.get("reward_min") or 0.0), max(1.0, row.get("reward_max") or 0.0)
        return max(least, value - Z95 * error), min(most, value + Z95 * error)
    graded = row.get(GRADED + metric.removeprefix(SUCCESS))
    if metric.startswith(SUCCESS) and graded:
        return wilson(round(value * graded), int(graded))
    return None


def seconds_of(row: Mapping[str, float | None]) -> float:
    """Wall clock of a step: its phases, which do not overlap."""
    return sum(row.get(f"seconds_{phase}") or 0.0 for phase in ("rollout", "train", "save"))


def seconds_left(rows: list[Row], done: int, total: int) -> float | None:
    """By the median of the last ten steps; None before the first."""
    recent = [seconds_of(row) for row in rows[-10:]]
    return median(recent) * (total - done) if recent else None


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
