"""How often the gate of `nano-rl improve` errs, on simulated projects.

    python benchmarks/improve_gate.py [--projects 500] [--write] [--smoke]

Synthetic: a project has 40 held-out places of 1 to 3 tasks, each with a success rate of its own, drawn from
Beta(0.6, 0.9). In each of 30 cycles a candidate runs every task once, and so does the policy before it. The
candidate's rates are those of the policy, shifted by so many points: 0 is a policy that training does not
change. The watch sees ordinary checked runs before and after a promotion, 200 of each at most.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from nano_rl.checkpoints.evaluate import by_cluster, sign_flip, wilson
from nano_rl.checkpoints.promotion import SuccessDifference
from nano_rl.improve.gate import decide, fallen

RESULT = Path(__file__).parents[1] / "docs" / "results" / "improve_gate.json"
CYCLES, PLACES, RUNS = 30, 40, 200
FALLS = ((0.6, 0.6), (0.9, 0.9), (0.6, 0.4), (0.6, 0.3), (0.9, 0.6), (0.3, 0.1))


def difference(values: list[tuple[str, float]]) -> SuccessDifference:
    """The difference without the bootstrap, which the gate does not ask."""
    clusters = by_cluster(values)
    mean = sum(value for _, value in values) / len(values)
    return SuccessDifference(
        name="held out", tasks=len(values), clusters=len(clusters), changed=0, mean=mean, low=mean, high=mean,
        p_better=sign_flip(clusters), p_worse=1.0,
    )  # fmt: skip


def promoted_in(seed: int, shift: float) -> int | None:
    """The first cycle in which a candidate is promoted; None: in none of them."""
    rng = random.Random(seed)
    tasks = [
        (str(place), min(0.98, max(0.02, rng.betavariate(0.6, 0.9))))
        for place in range(PLACES)
        for _ in range(rng.randint(1, 3))
    ]
    for cycle in range(1, CYCLES + 1):
        values = [
            (place, float(rng.random() < min(1.0, max(0.0, rate + shift))) - float(rng.random() < rate))
            for place, rate in tasks
        ]
        if decide(cycle, difference(values), None).promoted:
            return cycle
    return None


def measured(projects: int) -> dict[str, object]:
    promotions = []
    for shift in (0.0, -0.05, 0.1, 0.2):
        first = [cycle for seed in range(projects) if (cycle := promoted_in(seed, shift)) is not None]
        low, high = wilson(len(first), projects)
        median = sorted(first)[len(first) // 2] if first else None
        promotions.append(
            {"shift": shift, "promoted": len(first) / projects, "low": low, "high": high, "cycle": median}
        )
    falls = []
    for before, after in FALLS:
        rng = random.Random(1)
        found = []
        for _ in range(projects):
            runs = [[rng.random() < rate for _ in range(RUNS)] for rate in (before, after)]
            found.append(fallen(*runs))
        ended = sorted(count for count in found if count is not None)
        falls.append({"before": before, "after": after, "taken_back": len(ended) / projects,
                      "runs": ended[len(ended) // 2] if ended else None,
                      "runs_90": ended[len(ended) * 9 // 10] if ended else None})  # fmt: skip
    return {
        "projects": projects,
        "cycles": CYCLES,
        "places": PLACES,
        "promotions": promotions,
        "falls": falls,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--projects", type=int, default=500)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    result = measured(10 if given.smoke else given.projects)
    print(json.dumps(result, indent=1))
    if given.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
