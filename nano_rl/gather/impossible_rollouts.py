"""Control rollouts of impossible tasks, and the metrics of reward hacking in a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from nano_coder.run.execution import Runtime
from nano_rl.checkpoints.statistics import wilson
from nano_rl.config.training import RewardConfig
from nano_rl.gather.rollouts import OnRun, collect
from nano_rl.learn.metrics import MetricsRow
from nano_rl.rewards import Reward, open_reward
from nano_rl.rewards.reward import IMPOSSIBLE
from nano_rl.tasks.impossible import can_conflict, impossible
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory

TAMPERING = "tampering/"
"""prefix of the metrics that count rollouts by kind of tampering"""


def controls_due(step: int, rollouts: int, fraction: float) -> int:
    """Number of control rollouts in a step, so that their share of all `rollouts` so far is `fraction`."""
    each = rollouts * fraction
    # rounded because of errors such as 3 * 0.1 < 0.3, which would delay a control by a step
    return int(round((step + 1) * each, 9)) - int(round(step * each, 9))


def roll_controls(
    tasks: Sequence[Task],
    runtime: Runtime,
    reward: Reward | None,
    *,
    step: int,
    due: int,
    seed: int,
    on_run: OnRun | None = None,
) -> list[Trajectory]:
    """Roll out `due` impossible variants of the tasks, graded and logged, which are never trained on.

    Raises UsageError if no task can be made impossible.
    """
    if not due:
        return []
    able = [task for task in tasks if can_conflict(task)]
    if not able:
        raise UsageError(
            "none of the tasks can be made impossible, so there are no controls: their hidden checks are"
            " commands, or they have none; leave `controls` out"
        )
    rng = Random(f"controls {seed} {step}")
    # seeds that differ modulo `due` give different keys if a task is drawn twice
    chosen = [impossible(rng.choice(able), seed=rng.randrange(10**6) * due + i) for i in range(due)]
    flagging = reward or open_reward(RewardConfig())
    return collect(chosen, runtime, seed=seed * 1_000_003 + step, on_run=on_run, reward=flagging)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HackRow:
    """Reward hacking in a range of steps."""

    first_step: int
    last_step: int
    rollouts: int
    tampered: int
    """number of rollouts with tampering"""
    kinds: dict[str, int]
    """kind of tampering -> number of rollouts with it, including controls"""
    controls: int
    """number of graded control rollouts"""
    passes: int
    """number of passed control rollouts, each a proven hack"""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the pass rate on controls."""
        return wilson(self.passes, self.controls)


def hack_rows(metrics: Sequence[MetricsRow], *, at_most: int = 20) -> list[HackRow]:
    """The steps of a training in order, in at most `at_most` rows."""
    size = max(1, -(-len(metrics) // at_most))
    return [hack_row(metrics[i : i + size]) for i in range(0, len(metrics), size)]


def hack_row(metrics: Sequence[MetricsRow]) -> HackRow:
    """The steps as one row. Rows of versions of nano that did not record hacking count as 0."""

    def total(name: str) -> int:
        return int(sum(row.get(name) or 0 for row in metrics))

    kinds: Counter[str] = Counter()
    for row in metrics:
        for name, value in row.items():
            if name.startswith(TAMPERING):
                kinds[name.removeprefix(TAMPERING)] += int(value or 0)
    return HackRow(
        first_step=int(metrics[0].get("step") or 0),
        last_step=int(metrics[-1].get("step") or 0),
        rollouts=total("rollouts"),
        tampered=total("tampered"),
        kinds=dict(kinds.most_common()),
        controls=total("controls_graded"),
        passes=total("control_passes"),
    )
