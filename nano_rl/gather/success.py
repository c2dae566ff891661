"""Success: of the rollouts of a step, by level, and of held-out tasks during a training."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_coder.run.execution import Runtime, is_reflection
from nano_rl.checkpoints.evaluate import row_of
from nano_rl.gather.rollouts import collect
from nano_rl.gather.sources import Sources
from nano_rl.learn.metrics import GRADED, HELD_OUT, PART, SUCCESS, RowWriter
from nano_rl.learn.rows.group import Group
from nano_rl.rewards import outcome
from nano_rl.rewards.reward import IMPOSSIBLE
from nano_rl.rewards.tests import is_composed
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory

HELD_OUT_FILE = "held_out.jsonl"
"""the file's name in the folder of a training"""
_MEASUREMENTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Tasks that a training is measured on and never trained on; measurements are appended to a file."""

    tasks: tuple[Task, ...]
    folder: Path
    """folder of the training"""
    seed: int

    def due(self, step: int, steps: int) -> bool:
        """True if the weights after `step` of `steps` updates are to be measured: about ten times in all."""
        return step == steps or step % max(1, steps // _MEASUREMENTS) == 0

    def measure(self, live: Runtime, step: int, steps: int) -> dict[str, float]:
        """Roll out each task once, with the same seeds at every measurement; returns the metric `held_out`.

        Empty where none is due. Appends a row to `held_out.jsonl`. Rows of this and later steps, left by a
        killed process, are dropped.
        """
        if not (self.tasks and self.due(step, steps)):
            return {}
        runs = collect(self.tasks, live, seed=self.seed)
        found = row_of("all", runs)
        if not found.graded:
            return {}
        interval = {"low": found.low, "high": found.high}
        row = {"step": step, "success": found.rate, "graded": found.graded, **interval}
        with RowWriter(self.folder / HELD_OUT_FILE, resume_at=step) as rows:
            rows.write_row(row)
        return {HELD_OUT: found.rate}


def refuse_trained(sources: Sources) -> None:
    """Raises UsageError if a held-out task is also trained on."""
    unseen = {task.id for task in sources.held_out}
    if both := unseen and unseen & {task.id for task in sources.every_task}:
        raise UsageError(
            f"{len(both)} of the {len(unseen)} held-out tasks are among those trained on; make them"
            " with --split test"
        )


def success_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`success/...` and `graded/...` by level and of second attempts (`second`, in no other rate), `part/...`
    of each part of a composed reward, `reward_min` and `reward_max` of the step, and `reward_error`, the
    standard error of the mean reward.

    A success is a test outcome of 1, whatever a composed reward adds. The standard error is computed over
    groups, since rollouts of one task are not independent; it is absent below two scored groups.
    """
    outcomes: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for run in group.trajectories:
            value = outcome(run.verdict)
            if value is not None and is_reflection(run):
                outcomes["second"].append(value)
            elif value is not None:
                outcomes["all"].append(value)
                if run.task.level is not None:
                    outcomes[f"level_{run.task.level}"].append(value)
    metrics: dict[str, float] = {}
    for name, values in sorted(outcomes.items()):
        metrics[f"{SUCCESS}{name}"] = sum(value >= 1 for value in values) / len(values)
        metrics[f"{GRADED}{name}"] = float(len(values))
    metrics |= _parts(groups)
    rewards = [r for group in groups for r in group.rewards_G if not math.isnan(r)]
    if rewards:
        metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    error = _error([_mean(group) for group in groups])
    return metrics if error is None else {**metrics, "reward_error": error}


def _parts(groups: Sequence[Group]) -> dict[str, float]:
    """Mean score of each reward part, whether it counted or not; without its details (`part.detail`)."""
    scores: dict[str, list[float]] = defaultdict(list)
    for verdict in (run.verdict for group in groups for run in group.trajectories):
        if verdict is not None and is_composed(verdict):
            for name, value in verdict.components.items():
                if value is not None and "." not in name:
                    scores[name].append(value)
    return {f"{PART}{name}": math.fsum(values) / len(values) for name, values in sorted(scores.items())}


def _mean(group: Group) -> float:
    scored = [r for r in group.rewards_G if not math.isnan(r)]
    return math.fsum(scored) / len(scored) if scored else math.nan


def _error(means: Sequence[float]) -> float | None:
    known = [mean for mean in means if not math.isnan(mean)]
    if len(known) < 2:
        return None
    centre = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((m - centre) ** 2 for m in known) / (len(known) - 1) / len(known))


TAMPERING = "tampering/"
"""prefix of the metrics that count rollouts by kind of tampering"""


def hack_metrics(runs: Sequence[Trajectory], controls: Sequence[Trajectory]) -> dict[str, float]:
    """`tampered`, `tampering/KIND`: rollouts with tampering, by kind; `controls`, `controls_graded`,
    `control_passes`: control rollouts, graded ones, passed ones."""
    kinds = Counter(
        kind for run in (*runs, *controls) if run.verdict for kind in {t.kind for t in run.verdict.tampering}
    )
    tampered = sum(bool(run.verdict and run.verdict.tampering) for run in runs)
    metrics = {"tampered": float(tampered), "controls": float(len(controls))}
    metrics |= {
        "controls_graded": float(sum(run.reward is not None for run in controls)),
        "control_passes": float(kinds.pop(IMPOSSIBLE, 0)),
    }
    return metrics | {f"{TAMPERING}{kind}": float(count) for kind, count in sorted(kinds.items())}
