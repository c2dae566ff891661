"""Whether logs teach: an equal budget of rollouts, spent on logged runs, on fresh ones, or on both.

A tiny policy is warm-started and then runs on tasks that it has not seen; everything is logged. Four arms
learn from as many runs as each other, in as many steps:

    logs         logged runs alone
    both         half logged, half fresh, in the same groups (--fresh 8 --mix 0.5)
    fresh        fresh rollouts alone; its weights half-way have seen as many fresh ones as `both`
    imitation    maximum likelihood on the successes of the log

Bar: `both` reaches what `fresh` does with at most half of the fresh rollouts.

    python integration/logs_teach.py --out FOLDER --seeds 0 1 2 3 4     minutes a seed on one thread
    python integration/logs_teach.py --out FOLDER --report              the table of what is there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from log_arms import GROUP, SMOKE, Bench, Scale, difference, rate
from smoke import parse

from nano_rl.learn.config import LogsConfig

STEPS, PROMPTS = 24, 8
RUNS = STEPS * PROMPTS * GROUP
SCALE = Scale(
    tasks=300 + STEPS * PROMPTS, oracles=300, held_out=100, learning_rate=3e-4, max_tokens=32,
)  # fmt: skip
ARMS = ("warm", "logs", "both", "fresh", "fresh-half", "imitation")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not options.report:
        for seed in options.seeds:
            _run(options.out / f"seed-{seed}", seed, *((SMOKE, 2, 1) if options.smoke else ()))
    reached = _report(options.out)
    return 0 if options.smoke else reached


def _run(home: Path, seed: int, scale: Scale = SCALE, steps: int = STEPS, prompts: int = PROMPTS) -> None:
    bench = Bench(home, scale, seed=seed)
    warm = bench.warm()
    bench.arm("warm", lambda: warm, logged=0, fresh=0)
    log = bench.log("warm", warm, bench.tasks.train[scale.oracles :])
    size: dict[str, Any] = {"steps": steps, "prompts": prompts}
    bench.arm("logs", lambda: bench.train("logs", warm, stores=[log], **size), logged=RUNS, fresh=0)
    bench.arm(
        "both",
        lambda: bench.train("both", warm, stores=[log], fresh=GROUP, logs=LogsConfig(), **size),
        logged=RUNS // 2, fresh=RUNS // 2,
    )  # fmt: skip
    bench.arm(
        "fresh",
        lambda: bench.train(
            "fresh", warm, tasks=bench.tasks.train[scale.oracles :], fresh=GROUP, keep=[steps // 2], **size
        ),
        logged=0, fresh=RUNS,
    )  # fmt: skip
    half = home / "checkpoints" / f"fresh-{steps // 2}"
    bench.arm("fresh-half", lambda: half, logged=0, fresh=RUNS // 2)
    bench.arm("imitation", lambda: bench.imitate("imitation", warm, [log], steps=steps), logged=RUNS, fresh=0)


def _report(out: Path) -> int:
    """Print each arm over the seeds that have it, and the bar. Exit code 1 where it is not reached."""
    results = [json.loads(path.read_text()) for path in sorted(out.glob("seed-*/arm-*.json"))]
    by_arm = {arm: {r["seed"]: r for r in results if r["arm"] == arm} for arm in ARMS}
    print(f"{'arm':12} {'logged':>7} {'fresh':>7}  held-out success")
    for arm, of in by_arm.items():
        if of:
            rates = [rate(r) for r in of.values()]
            first = next(iter(of.values()))
            each = " ".join(f"{one:6.1%}" for one in rates)
            print(f"{arm:12} {first['logged']:7} {first['fresh']:7}  {mean(rates):6.1%}   seeds: {each}")
    reached = difference("both", "fresh", by_arm)
    difference("both", "fresh-half", by_arm)
    difference("logs", "warm", by_arm)
    difference("logs", "imitation", by_arm)
    if reached is None:
        print("the bar needs the arms `both` and `fresh` of a seed")
        return 1
    gained, low, _ = reached
    verdict = (
        "reached" if gained >= 0 else "not told apart from reached" if low <= 0 <= reached[2] else "missed"
    )
    print(f"bar (both >= fresh with half of its fresh rollouts): {verdict}")
    return 0 if gained >= 0 else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An equal budget of rollouts, logged or fresh.")
    parser.add_argument("--out", type=Path, required=True, help="a folder a seed, a JSON file an arm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="train nothing; the table of what is there")
    return parse(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
