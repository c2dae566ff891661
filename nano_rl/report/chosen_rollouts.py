"""The rollouts of a training that its page points to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from nano_rl.record.training_record import Rollout


@dataclass(frozen=True, slots=True)
class ChosenRollout:
    why: str
    step: int
    rollout: Rollout


def choose(steps: Mapping[int, Sequence[Rollout]], *, seed: int = 0) -> list[ChosenRollout]:
    """At most eight different rollouts: best, worst and a random one of the first and of the last step with a
    graded rollout, the last rollout with tampering, and the last passed impossible control.

    Ties are broken by `seed`.
    """
    graded = {
        step: [r for r in runs if r.reward is not None and not r.control] for step, runs in steps.items()
    }
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

    ends = (
        dict(zip(("beginning", "end"), dict.fromkeys((order[0], order[-1])), strict=False)) if order else {}
    )
    for where, step in ends.items():
        take(f"Best at the {where}", step, graded[step], best=True)
        take(f"Worst at the {where}", step, graded[step], best=False)
        take(f"Random at the {where}", step, graded[step])
    for why, is_hack in (
        ("Tampering was found", lambda r: r.tampered and not r.control),
        ("An impossible control was passed", lambda r: r.control and r.tampered),
    ):
        for step in sorted(steps, reverse=True):
            hacks = [run for run in steps[step] if is_hack(run)]
            if hacks:
                take(why, step, hacks)
                break
    return chosen
