"""Which rollouts a page shows: the best, the worst and one at random, of the beginning and of the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from nano_rl.watch.rollouts import Rollout


@dataclass(frozen=True, slots=True)
class Choice:
    why: str
    step: int
    rollout: Rollout


def choose(steps: Mapping[int, Sequence[Rollout]], *, seed: int = 0) -> list[Choice]:
    """At most eight rollouts, none twice: three of the first step, three of the last, and hacks if there are.

    Of equally good ones the seed chooses. Beginning and end are the first and the last step that has a graded
    rollout; a training of one step has no end of its own. The hacks are the last rollout in which tampering
    was found, and the last impossible control that was passed.
    """
    graded = {
        step: [r for r in runs if r.reward is not None and not r.control] for step, runs in steps.items()
    }
    order = [step for step in sorted(graded) if graded[step]]
    chosen: list[Choice] = []

    def take(why: str, step: int, runs: Sequence[Rollout], best: bool | None = None) -> None:
        left = [run for run in runs if run.id not in {c.rollout.id for c in chosen}]
        if not left:
            return
        if best is not None:
            wanted = (max if best else min)(run.reward or 0.0 for run in left)
            left = [run for run in left if (run.reward or 0.0) == wanted]
        chosen.append(Choice(why, step, Random(f"{seed} {why}").choice(left)))

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
