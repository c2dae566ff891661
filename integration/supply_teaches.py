"""Whether the supply of tasks teaches: a tiny policy on levels 1 and 2, held-out programs and families.

A tiny Llama is warm-started on a few oracle runs of both levels, then trained on fresh rollouts of the
supply alone. Its success is measured along the way, by level, on programs that training never saw (same
families) and on families that it never saw.

    python integration/supply_teaches.py --seed 0 --out FOLDER      one seed
    python integration/supply_teaches.py --report FOLDER FOLDER...  the table of several
    python integration/supply_teaches.py --seed 0 --constants       the best constant answer, without training
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from flywheel import say
from log_arms import GROUP, SMOKE, Bench, Scale
from smoke import parse

from integration.paired import paired
from nano_rl.checkpoints.evaluate import table
from nano_shared.types import Task, Trajectory

SCALE = Scale(
    levels=(1, 2), views=("choose", "replace"), tasks=1200, oracles=600, held_out=200, sft_epochs=3.0,
    max_tokens=32, learning_rate=1.5e-4,
)  # fmt: skip
STEPS, PROMPTS, KEEP_EVERY = 140, 16, 35
RESULT = "result.json"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.report:
        return _report([json.loads((folder / RESULT).read_text()) for folder in options.report])
    if options.constants:
        return _constants(options.seed)
    if options.out is None:
        sys.exit("give --out FOLDER, where log, checkpoints and result.json are kept, or --report FOLDER...")
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    say(started, "1. Tasks of levels 1 and 2: to train on, held-out programs, held-out families")
    steps, prompts, scale = (1, 1, SMOKE) if options.smoke else (STEPS, PROMPTS, SCALE)
    bench = Bench(options.out, scale, seed=options.seed)
    say(started, f"2. Warm start on {scale.oracles} oracle runs")
    points = {0: bench.warm()}
    say(started, f"3. {steps} steps on fresh rollouts of the supply")
    kept = range(KEEP_EVERY, steps, KEEP_EVERY)
    last = bench.train(
        "trained", points[0], steps=steps, prompts=prompts, fresh=GROUP, tasks=bench.tasks.train, keep=kept
    )
    points |= {step: last.with_name(f"{last.name}-{step}") for step in kept} | {steps: last}
    say(started, "4. Held-out success along the way")
    curve = {
        step: {
            "programs": _evaluate(bench, checkpoint, bench.tasks.held_out, f"programs, step {step}"),
            "families": _evaluate(bench, checkpoint, bench.tasks.families, f"families, step {step}"),
        }
        for step, checkpoint in points.items()
    }
    first, final = curve[0], curve[steps]
    result = {
        "seed": options.seed,
        "curve": {step: {kind: _rates(runs) for kind, runs in at.items()} for step, at in curve.items()},
        "gain": {kind: paired(final[kind], first[kind]) for kind in first},
        "gain_by_level": {
            kind: {level: paired(_of(final[kind], level), _of(first[kind], level)) for level in scale.levels}
            for kind in first
        },
        "seconds": time.monotonic() - started,
    }
    (options.out / RESULT).write_text(json.dumps(result, indent=2))
    gained = _report([json.loads(json.dumps(result))])
    return 0 if options.smoke else gained


def _constants(seed: int) -> int:
    """Print which operator is the right answer most often in each held-out set, and how often."""
    with tempfile.TemporaryDirectory() as home:
        tasks = Bench(Path(home), SCALE, seed=seed).tasks
    for kind, held_out in (("programs", tasks.held_out), ("families", tasks.families)):
        answers = Counter(
            call.arguments.get("answer", call.arguments.get("new"))
            for call, *_ in (task.oracle for task in held_out if task.oracle)
        )
        ((answer, count),) = answers.most_common(1)
        print(f"{kind}: always {answer!r} is right in {count / len(held_out):.1%} of {len(held_out)}")
    return 0


def _evaluate(bench: Bench, checkpoint: Path, tasks: list[Task], title: str) -> list[Trajectory]:
    runs = bench.evaluate(checkpoint, tasks)
    print(title, *(f"{row.name} {row.rate:.1%}" for row in table(runs)))
    return runs


def _of(runs: list[Trajectory], level: int) -> list[Trajectory]:
    return [run for run in runs if run.task.level == level]


def _rates(runs: list[Trajectory]) -> dict[str, object]:
    return {row.name: asdict(row) for row in table(runs)}


def _report(results: list[dict]) -> int:  # type: ignore[type-arg]
    """Print the curves, and say whether programs gained 25 points and families 10."""
    rates = defaultdict(list)
    for result in results:
        for step, at in result["curve"].items():
            for kind, rows in at.items():
                for name, row in rows.items():
                    rates[kind, name, int(step)].append(row["successes"] / max(1, row["graded"]))
    for (kind, name, step), values in sorted(rates.items()):
        each = " ".join(f"{value:6.1%}" for value in values)
        print(f"{kind:9} {name:16} step {step:3}: mean {mean(values):6.1%}   {each}")
    reached = True
    for kind, bar in (("programs", 0.25), ("families", 0.10)):
        gains = [result["gain"][kind] for result in results]
        for result, (gain, low, high) in zip(results, gains, strict=True):
            print(
                f"{kind}: seed {result['seed']} {gain:+.1%} (95 % interval {low:+.1%} to {high:+.1%}, paired)"
            )
        reached &= mean(gain for gain, _, _ in gains) >= bar
    return 0 if reached else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whether the supply of tasks teaches a tiny policy.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep log, checkpoints and result.json here")
    parser.add_argument("--constants", action="store_true", help="print the best constant answers, and end")
    parser.add_argument("--report", type=Path, nargs="+", help="folders of seeds that ran")
    return parse(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
