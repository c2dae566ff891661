"""Objectives side by side: one warm start, the same tasks, the same number of rollouts, one process an arm.

A tiny policy, function tasks of levels 1 and 2. Every objective takes its paper's settings by its name; what
differs between arms is that name. DPO's arm learns offline, from as many runs of the starting policy. One
control must do worse: rewards shuffled over the step.

    python integration/objectives.py --out FOLDER --seeds 0 1 2    some two minutes an arm on one thread
    python integration/objectives.py --out FOLDER --report         success, spread, time a step, peak memory
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev

from flywheel import Scale
from log_arms import GROUP, Bench
from rich.console import Console
from rich.table import Table

from nano_coder.runtime import open_weights
from nano_rl.config import ObjectiveConfig, OptimizerConfig
from nano_rl.demonstrations import reader_of
from nano_rl.dpo import train_dpo
from nano_rl.learner import prepare
from nano_rl.log_pairs import log_pairs
from nano_rl.metrics import METRICS, read_metrics
from nano_rl.preference_config import DpoConfig
from nano_rl.preference_pairs import pair_rows

STEPS, PROMPTS = 40, 8
SCALE = Scale(tasks=300 + STEPS * PROMPTS, oracles=300, held_out=200, learning_rate=3e-4, max_tokens=32)
OBJECTIVES = ("recipe", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo")
ARMS = ("warm", *OBJECTIVES, "dpo", "shuffled")


def run_arm(home: Path, seed: int, arm: str) -> None:
    """Train and evaluate one arm, unless its file is there."""
    bench = Bench(home, SCALE, seed=seed)
    warm = bench.warm()
    tasks = bench.tasks.train[SCALE.oracles :]
    size = {"steps": STEPS, "prompts": PROMPTS, "fresh": GROUP, "tasks": tasks}

    def make() -> Path:
        if arm == "warm":
            return warm
        if arm == "dpo":
            return _dpo(bench, warm)
        if arm == "shuffled":
            return bench.train(arm, warm, shuffle_rewards=True, **size)
        return bench.train(arm, warm, objective=ObjectiveConfig(objective=arm), **size)

    started = time.monotonic()
    made = make()
    told = {"train_seconds": time.monotonic() - started, "peak_mb": peak_mb()}
    bench.arm(arm, lambda: made, **told)


def peak_mb() -> float:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _dpo(bench: Bench, warm: Path) -> Path:
    """Runs of the starting policy, as many as the others roll out; a success against a failure of a task."""
    with bench.log("warm", warm, bench.tasks.train[SCALE.oracles :]) as store:
        opened = open_weights(str(warm))
        found = log_pairs(store, sources=("graded",), seed=bench.seed).pairs
    vocabulary = opened.loaded.model.get_input_embeddings().num_embeddings
    pairs = pair_rows(found, reader_of(opened), vocabulary=vocabulary)
    config = DpoConfig(
        batch=max(1, len(pairs) // STEPS), lora_rank=0, seed=bench.seed, save_every=1000,
        optimizer=OptimizerConfig(learning_rate=SCALE.learning_rate),
    )  # fmt: skip
    model = prepare(opened.loaded.model, lora_rank=0, seed=bench.seed)
    folder = bench.home / "state" / "dpo"
    folder.mkdir(parents=True, exist_ok=True)
    steps = train_dpo(model, pairs, config, folder, lambda *_: None)
    return bench.save("dpo", model, opened, config, warm, steps, [])


def report(out: Path) -> None:
    table = Table("objective", "held out", "seeds", "spread", "collapsed", "s a step", "peak MB")
    for arm in ARMS:
        paths = sorted(out.glob(f"seed-*/arm-{arm}.json"))
        if not paths:
            continue
        results = [json.loads(path.read_text()) for path in paths]
        rates = [100 * mean(result["rewards"]) for result in results]
        seconds = mean(result["train_seconds"] for result in results) / STEPS
        low = [_lowest(path.parent / "state" / arm / METRICS) for path in paths]
        table.add_row(
            arm, f"{mean(rates):.1f} %", " ".join(f"{rate:.1f}" for rate in rates), f"{pstdev(rates):.1f}",
            str(sum(value == 0 for value in low)), f"{seconds:.2f}" if arm != "warm" else "",
            f"{max(result['peak_mb'] for result in results):.0f}",
        )  # fmt: skip
    Console(width=110).print(table)


def _lowest(metrics: Path) -> float:
    """The mean reward of the last quarter of the steps, 0 of a policy that has collapsed; 1 without steps."""
    found = read_metrics(metrics) if metrics.exists() else []
    rows = [row["reward_mean"] for row in found if "reward_mean" in row]
    return mean(rows[-max(1, len(rows) // 4) :]) if rows else 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Objectives side by side.")
    parser.add_argument("--out", type=Path, required=True, help="a folder a seed, a JSON file an arm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--report", action="store_true", help="train nothing; the table of what is there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        run_arm(options.out / f"seed-{options.seeds[0]}", options.seeds[0], options.one)
        return 0
    for seed in [] if options.report else options.seeds:
        for arm in options.arms:
            if not (options.out / f"seed-{seed}" / f"arm-{arm}.json").exists():
                command = [sys.executable, __file__, "--out", str(options.out), "--seeds", str(seed)]
                subprocess.run([*command, "--one", arm], check=True)
    report(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
