"""Objectives side by side: one warm start, the same tasks, the same number of rollouts, one process an arm.

A tiny policy, function tasks of levels 1 and 2. Every objective takes its paper's settings by its name; what
differs between arms is that name. DPO learns offline, from as many runs of the starting policy, once alone
and once with imitation of the chosen side beside it. Arms of eight updates a step (four minibatches, two
passes), at a third of the rate, have ratios that are not 1, with the clip and without. Three controls must
do worse: rewards shuffled over the step, rollouts compared with those of other tasks, and every token of a
row trained (`negative_controls.py`).

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any
from unittest.mock import patch

import negative_controls
from log_arms import GROUP, SMOKE, Bench, Scale, difference, rate
from negative_controls import mask_off, shuffled_rewards, wrong_groups
from rich.console import Console
from rich.table import Table
from smoke import parse

from nano_coder.models.opening import open_weights
from nano_preferences import critic
from nano_preferences.config import DpoConfig
from nano_preferences.dpo import train_dpo
from nano_preferences.log_pairs import log_pairs
from nano_preferences.pairs import pair_rows
from nano_rl.imitation import reader_of
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.objectives import ObjectiveConfig

STEPS, PROMPTS = 40, 8
SCALE = Scale(
    levels=(1, 2), views=("choose", "replace"), tasks=600 + STEPS * PROMPTS, oracles=600, held_out=200,
    sft_epochs=3.0, learning_rate=3e-4, max_tokens=32,
)  # fmt: skip
SMALL_STEPS = 2
SMALL = replace(SCALE, tasks=SCALE.oracles + SMALL_STEPS * PROMPTS, held_out=8)
OBJECTIVES = ("recipe", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo")
CONTROLS = ("shuffled", "wrong-group", "mask-off")
DPO = {"dpo": 0.0, "dpo-sft": 1.0}
"""and the weight of imitating the chosen side"""
BARE = f"{Path(negative_controls.__file__)}:NO_WEIGHTS"
NO_CLIP = {"clip_low": 1.0, "clip_high": 1e9}
SEVERAL = {
    "reinforce-8": ObjectiveConfig(objective="reinforce"),
    "grpo-8": ObjectiveConfig(objective="grpo"),
    "grpo-8-no-clip": ObjectiveConfig(objective="grpo", **NO_CLIP),
    "ppo-8": ObjectiveConfig(objective="ppo"),
    "ppo-8-no-clip": ObjectiveConfig(objective="ppo", **NO_CLIP),
}
"""arms of eight updates a step"""
UPDATES: dict[str, Any] = {"minibatches": 4, "updates_per_step": 2, "learning_rate": 1e-4}
PPO_GAE = "ppo-gae-0.95"
"""PPO with gae_lambda 0.95 instead of 1"""
ARMS = ("warm", *OBJECTIVES, PPO_GAE, *SEVERAL, *DPO, *CONTROLS)


def run_arm(
    home: Path, seed: int, arm: str, *, scale: Scale = SCALE, steps: int = STEPS, prompts: int = PROMPTS
) -> None:
    """Train and evaluate one arm, unless its file is there."""
    bench = Bench(home, scale, seed=seed)
    warm = bench.warm()
    tasks = bench.tasks.train[scale.oracles :]
    size: dict[str, Any] = {"steps": steps, "prompts": prompts, "fresh": GROUP, "tasks": tasks}

    def make() -> Path:
        if arm == "warm":
            return warm
        if arm in DPO:
            return _dpo(bench, warm, arm, steps)
        if arm == "shuffled":
            with shuffled_rewards():
                return bench.train(arm, warm, **size)
        if arm == "wrong-group":
            with wrong_groups():
                return bench.train(arm, warm, **size)
        if arm == "mask-off":
            unguarded = GuardConfig(patience=steps + 1, mismatch_max=1e9)
            with mask_off():
                return bench.train(
                    arm, warm, objective=ObjectiveConfig(objective=BARE), guards=unguarded, **size
                )
        if arm in SEVERAL:
            return bench.train(arm, warm, objective=SEVERAL[arm], **UPDATES, **size)
        if arm == PPO_GAE:
            terms = critic.CriticTerms(gae_lambda=0.95)
            with patch.object(critic, "Critic", partial(critic.Critic, terms=terms)):
                return bench.train(arm, warm, objective=ObjectiveConfig(objective="ppo"), **size)
        return bench.train(arm, warm, objective=ObjectiveConfig(objective=arm), **size)

    started = time.monotonic()
    made = make()
    told = {"steps": steps, "train_seconds": time.monotonic() - started, "peak_mb": peak_mb()}
    bench.arm(arm, lambda: made, **told)


def peak_mb() -> float:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _dpo(bench: Bench, warm: Path, arm: str, steps: int) -> Path:
    """Runs of the starting policy, as many as the others roll out; a success against a failure of a task."""
    with bench.log("warm", warm, bench.tasks.train[bench.scale.oracles :]) as store:
        opened = open_weights(str(warm))
        found = log_pairs(store, sources=("graded",), seed=bench.seed).pairs
    pairs = pair_rows(found, reader_of(opened))
    config = DpoConfig(
        batch=max(1, len(pairs) // steps), lora_rank=0, lambda_sft=DPO[arm], seed=bench.seed, save_every=1000,
        optimizer=OptimizerConfig(learning_rate=bench.scale.learning_rate),
    )  # fmt: skip
    model = prepare(opened.loaded.model, lora_rank=0, seed=bench.seed)
    folder = bench.home / "state" / arm
    folder.mkdir(parents=True, exist_ok=True)
    done = train_dpo(model, pairs, config, folder, lambda *_: None)
    return bench.save(arm, model, opened, config, warm, done, [])


def report(out: Path) -> None:
    """The table of what is there, each held-out program counted once. A seed has collapsed that ends below
    half of the success it began with."""
    by_arm = {arm: _results(out, arm) for arm in ARMS}
    starts = {seed: rate(result) for seed, result in by_arm["warm"].items()}
    table = Table("objective", "held out", "seeds", "spread", "collapsed", "s a step", "peak MB")
    for arm, of_seeds in by_arm.items():
        if not of_seeds:
            continue
        results = list(of_seeds.values())
        rates = [100 * rate(result) for result in results]
        seconds = mean(result["train_seconds"] / result.get("steps", STEPS) for result in results)
        collapsed = sum(rate(result) < starts[result["seed"]] / 2 for result in results)
        table.add_row(
            arm, f"{mean(rates):.1f} %", " ".join(f"{of:.1f}" for of in rates), f"{pstdev(rates):.1f}",
            str(collapsed), f"{seconds:.2f}" if arm != "warm" else "",
            f"{max(result['peak_mb'] for result in results):.0f}",
        )  # fmt: skip
    Console(width=110).print(table)
    for other, arms in {"warm": ARMS, "grpo": ARMS, PPO_GAE: ("ppo",), "reinforce-8": SEVERAL}.items():
        for arm in arms:
            if arm not in ("warm", other):
                difference(arm, other, by_arm)


def _results(out: Path, arm: str) -> dict[int, dict[str, Any]]:
    """What is there of an arm, by seed."""
    results = [json.loads(path.read_text()) for path in sorted(out.glob(f"seed-*/arm-{arm}.json"))]
    return {result["seed"]: result for result in results}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Objectives side by side.")
    parser.add_argument("--out", type=Path, required=True, help="a folder a seed, a JSON file an arm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--small", action="store_true", help="two steps of each arm: that it runs")
    parser.add_argument("--report", action="store_true", help="train nothing; the table of what is there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parse(parser, arguments, arms=("warm", "grpo", "dpo", "shuffled"))
    if options.smoke:
        for arm in options.arms:
            run_arm(options.out / "seed-0", 0, arm, scale=SMOKE, steps=1, prompts=2)
    if options.one:
        work: dict[str, Any] = {"scale": SMALL, "steps": SMALL_STEPS} if options.small else {}
        run_arm(options.out / f"seed-{options.seeds[0]}", options.seeds[0], options.one, **work)
        return 0
    for seed in [] if options.report else options.seeds:
        for arm in options.arms:
            if not (options.out / f"seed-{seed}" / f"arm-{arm}.json").exists():
                command = [sys.executable, __file__, "--out", str(options.out), "--seeds", str(seed)]
                command += ["--small"] if options.small else []
                subprocess.run([*command, "--one", arm], check=True)
    report(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
