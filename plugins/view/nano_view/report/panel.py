"""The metrics of the live view by panel, with sparklines and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nano_rl.checkpoints.evaluate import Z95, wilson
from nano_rl.learn.metrics import GRADED, HELD_OUT, SUCCESS
from nano_rl.training_record import LINES, PanelLine

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOISE = 1e-6
"""relative spread below which a sparkline is flat"""


def sparkline(values: Sequence[float | None], *, width: int = 24) -> str:
    """The last `width` values as blocks between their minimum and maximum; a blank if not finite."""
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


PANELS: dict[str, tuple[PanelLine, ...]] = {
    "Reward": (
        LINES["reward_mean"],
        LINES[f"{SUCCESS}all"],
        PanelLine(HELD_OUT, "held-out success", ".1%"),
        LINES["frac_zero_std"],
        PanelLine("frac_unscored", "rollouts not graded", ".1%"),
        PanelLine("tampered", "tampered rollouts", ".0f"),
        PanelLine("curriculum_level", "open level", ".0f"),
    ),
    "Objective": (
        LINES["loss"],
        LINES["entropy"],
        PanelLine("kl_reference", "KL to the start"),
        PanelLine("approx_kl", "KL of the update"),
        PanelLine("clip_low", "clipped low", ".2%"),
        PanelLine("clip_high", "clipped high", ".2%"),
        PanelLine("ratio_deviation", "ratio away from 1"),
        LINES["grad_norm"],
        LINES["ess"],
        PanelLine("mismatch", "sampler - trainer"),
        LINES["stale"],
        PanelLine("learning_rate", "learning rate", ".2g"),
    ),
    "Time": (
        PanelLine("tokens_per_second_rollout", "rollout tokens/s", ".0f"),
        PanelLine("tokens_per_second_generate", "  generate tokens/s", ".0f"),
        PanelLine("tokens_per_second_sandbox", "  sandbox tokens/s", ".0f"),
        PanelLine("tokens_per_second_train", "training tokens/s", ".0f"),
        PanelLine("seconds_rollout", "rollout s", ".2f"),
        PanelLine("seconds_generate", "  generate s", ".2f"),
        PanelLine("seconds_sandbox", "  sandbox s", ".2f"),
        PanelLine("seconds_grade", "  grading s", ".2f"),
        PanelLine("seconds_train", "training s", ".2f"),
        PanelLine("seconds_save", "saving s", ".2f"),
    ),
}
"""heading -> its metrics; those that a training does not report are left out"""


def level_lines(row: Mapping[str, float | None]) -> tuple[PanelLine, ...]:
    """A line for the success at each level of a step."""
    levels = sorted(int(n.rpartition("_")[2]) for n in row if n.startswith(f"{SUCCESS}level_"))
    return tuple(PanelLine(f"{SUCCESS}level_{n}", f"  level {n}", ".1%") for n in levels)


def band(line: PanelLine, row: Mapping[str, float | None]) -> str:
    """The 95 % interval of a mean reward or success rate as text; empty for other metrics."""
    interval = interval_of(line.metric, row)
    return "" if interval is None else "{} to {}".format(*(format(end, line.form) for end in interval))


def interval_of(metric: str, row: Mapping[str, float | None]) -> tuple[float, float] | None:
    """The 95 % interval of a mean reward or success rate of one step; None for other metrics."""
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
