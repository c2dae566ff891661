"""Impossible rollouts beside the ordinary ones of a step, and what a step's metrics say about hacking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from nano_coder.runtime import Runtime
from nano_rl.config import RewardConfig
from nano_rl.rewards import Reward, open_reward
from nano_rl.rewards.reward import IMPOSSIBLE
from nano_rl.rollout import OnRun, collect
from nano_rl.tasks.impossible import can_conflict, impossible
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory

TAMPERING = "tampering/"
"""prefix of the metrics that count rollouts by kind of tampering"""


def controls_due(step: int, rollouts: int, fraction: float) -> int:
    """Control rollouts of one step, so that after every step their share of all `rollouts` is `fraction`."""
    each = rollouts * fraction
    # rounded against errors such as 3 * 0.1 < 0.3, which would delay a control by a step
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
    """Roll out `due` impossible variants of the tasks, graded and logged; none of them is for training.

    Raises UsageError where no task can be made impossible.
    """
    if not due:
        return []
    able = [task for task in tasks if can_conflict(task)]
    if not able:
        raise UsageError(
            "none of the tasks can be made impossible, so there are no controls: their hidden checks are"
            " commands, or they have none; leave --controls out"
        )
    rng = Random(f"controls {seed} {step}")
    # numbered seeds keep the keys apart where one task is drawn twice
    chosen = [impossible(rng.choice(able), seed=rng.randrange(10**6) * due + i) for i in range(due)]
    flagging = reward or open_reward(RewardConfig())
    return collect(chosen, runtime, seed=seed * 1_000_003 + step, on_run=on_run, reward=flagging)


def hack_metrics(runs: Sequence[Trajectory], controls: Sequence[Trajectory]) -> dict[str, float]:
    """Rollouts in which tampering was found, by kind, and how often controls were graded and passed."""
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
