"""Whether stale logs do harm: logs of policies 1, 4 and 16 updates old, with and without the corrections.

A tiny policy is trained on fresh rollouts for 16 updates, in three trainings one after the other, so that
the checkpoints after 0, 12, 15 and 16 updates are each other's parents. The first three write a log each. The
last one then trains from each log alone, twice:

    corrected     the defaults: importance weights truncated token by token, and the bounds on ess and drift
    uncorrected   neither: old rows are taken for fresh ones

and once on fresh rollouts of the same tasks, which tells what such a training does where nothing is stale.

Printed are success on held-out programs before and after, the effective sample size (ess) at the first step
and the last, what was dropped, and which logs the default bounds dropped rows of.

    python integration/stale_logs.py --out FOLDER --seeds 0 1 2      minutes a seed on one thread
    python integration/stale_logs.py --out FOLDER --report           the table of what is there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import negative_controls
from log_arms import GROUP, SMOKE, Bench, Scale, rate
from smoke import parse

from nano_rl.learn import train_step
from nano_rl.learn.config import LogsConfig
from nano_rl.learn.objectives import ObjectiveConfig

AGES = (1, 4, 16)
STEPS, PROMPTS = 8, 8
SCALE = Scale(tasks=300, oracles=300, held_out=100, learning_rate=3e-4, max_tokens=32)
BARE = f"{Path(negative_controls.__file__)}:NO_WEIGHTS"
CORRECTIONS = {
    "corrected": (LogsConfig(), ObjectiveConfig()),
    "uncorrected": (LogsConfig(), ObjectiveConfig(objective=BARE)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not options.report:
        for seed in options.seeds:
            _run(options.out / f"seed-{seed}", seed, *((SMOKE, (1,), 1, 1) if options.smoke else ()))
    harmless = _report(options.out)
    return 0 if options.smoke else harmless


def _run(
    home: Path, seed: int, scale: Scale = SCALE, ages: Sequence[int] = AGES, steps: int = STEPS,
    prompts: int = PROMPTS,
) -> None:  # fmt: skip
    bench = Bench(home, scale, seed=seed)
    policies = {0: bench.warm()}
    before = 0
    newest = max(ages)
    for updates in sorted({newest, *(newest - age for age in ages if age < newest)}):
        policies[updates] = bench.train(
            f"updates-{updates}", policies[before], steps=updates - before, prompts=prompts,
            tasks=bench.tasks.train, fresh=GROUP,
        )  # fmt: skip
        before = updates
    tasks = bench.tasks.train[-steps * prompts :]
    size: dict[str, Any] = {"steps": steps, "prompts": prompts}
    bench.arm("start", lambda: policies[newest], age=0)
    bench.arm(
        "fresh", lambda: bench.train("fresh", policies[newest], tasks=tasks, fresh=GROUP, **size), age=0
    )
    for age in ages:
        log = bench.log(f"age-{age}", policies[newest - age], tasks)
        for name, (logs, objective) in CORRECTIONS.items():
            arm = f"{name}-{age}"
            bench.arm(
                arm,
                lambda arm=arm, log=log, logs=logs, objective=objective: bench.train(  # type: ignore[misc]
                    arm, policies[newest], stores=[log], logs=logs, objective=objective, **size
                ),
                age=age,
            )  # fmt: skip


def _report(out: Path) -> int:
    """Print each arm over the seeds that have it; exit code 1 where a corrected arm fell below its start."""
    results = [json.loads(path.read_text()) for path in sorted(out.glob("seed-*/arm-*.json"))]
    starts = {r["seed"]: rate(r) for r in results if r["arm"] == "start"}
    if not starts:
        print("no arm is there yet")
        return 1
    print(f"start: {mean(starts.values()):.1%} held out, {len(starts)} seeds")
    print(f"{'arm':15} {'age':>3} {'success':>8} {'gain':>7} {'ess first':>9} {'ess last':>8} {'dropped':>7}")
    harmless = True
    for arm in ("fresh", *(f"{name}-{age}" for age in AGES for name in CORRECTIONS)):
        of = [r for r in results if r["arm"] == arm and r["seed"] in starts]
        if not of:
            continue
        rates = [rate(r) for r in of]
        gain = mean(ended - starts[r["seed"]] for ended, r in zip(rates, of, strict=True))
        ess = [[e for row in r["curve"] if (e := row["ess_logged"] or row["ess"]) is not None] for r in of]
        first, last = (mean(e[place] for e in ess if e) if any(ess) else float("nan") for place in (0, -1))
        dropped = mean(r["learned_from"].get("weight_dropped", 0.0) for r in of)
        told = f"{mean(rates):8.1%} {gain:+7.1%} {first:9.2f} {last:8.2f} {dropped:7.0f}"
        print(f"{arm:15} {of[0]['age']:3} {told}")
        harmless &= not arm.startswith("corrected") or gain >= 0
    corrected = [r for r in results if r["arm"].startswith("corrected")]
    ages = [r["age"] for r in corrected if r["learned_from"].get("weight_dropped")]
    bounds = f"min_ess {train_step.MIN_ESS:g}, max_drift {train_step.MAX_DRIFT:g}"
    print(
        f"the default bounds ({bounds}) "
        + (
            f"dropped rows of logs that were {', '.join(map(str, sorted(set(ages))))} updates old at first"
            if ages
            else "dropped nothing"
        )
    )
    return 0 if harmless else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Logs of policies 1, 4 and 16 updates old.")
    parser.add_argument("--out", type=Path, required=True, help="a folder a seed, a JSON file an arm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="train nothing; the table of what is there")
    return parse(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
