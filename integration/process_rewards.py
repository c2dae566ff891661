"""Rewards for the way as well as for the end: which teaches faster, and which is hacked.

The tiny policy of `flywheel.py` mends one wrong line of a synthetic file. From one warm start GRPO trains
with three rewards on equal rollouts: `tests`, the outcome alone; `gated`, our own composition, where the
worth of the turns counts in runs that passed (0.7 tests, 0.3 process); `dense`, where each turn earns at
once, in runs that fail too: +0.3 for an edit, +0.1 for another call that worked, -0.2 for one that failed
or could not be read, and 1 for the end. Measured at temperature 1 on held-out programs: success, turns,
what the turns of a run earn under `dense`, and that of the runs that failed.

    python integration/process_rewards.py --out FOLDER [--seeds 0 1 2] [--write]
                                                     docs/results/process_rewards.json

Finished arms are read back from FOLDER; the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from flywheel import SMOKE, Budget
from log_arms import GROUP, Bench, over_seeds
from smoke import parse

from nano_coder.run.execution import Runtime
from nano_preferences.registry import open_reward, parse_reward
from nano_rl.rewards.reward import Reward
from nano_shared.types import Observation, Trajectory, Trust, Turn, Verdict

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "process_rewards.json"
COMMAND = "python integration/process_rewards.py --out FOLDER --write"
ARMS = ("start", "tests", "gated", "dense")
STEPS, PROMPTS = 40, 8
BUDGET = Budget(logged=0, steps=STEPS, prompts=PROMPTS, held_out=200)


class Dense(Reward):
    """Each turn's earnings, added to the outcome."""

    def __init__(self) -> None:
        pass

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        return [
            run.model_copy(update={"verdict": _verdict(run.reward + earned(run))})
            if run.reward is not None
            else run
            for run in runs
        ]


def _verdict(reward: float) -> Verdict:
    return Verdict(reward=reward, trust=Trust.HIDDEN, grader="dense-1", graded_hash="")


def earned(run: Trajectory) -> float:
    return sum(map(_turn, run.turns))


EDIT, CALL, FAILED = 0.3, 0.1, -0.2
"""what a call earns under `dense`"""


def _turn(turn: Turn) -> float:
    if turn.parse_error is not None or not turn.calls:
        return FAILED
    return sum(map(_call, turn.observations))


def _call(observation: Observation) -> float:
    if observation.exit_code is None and not observation.ok:
        return FAILED
    return EDIT if observation.tool == "edit_file" else CALL


def reward_of(arm: str) -> Reward | None:
    if arm == "gated":
        return open_reward(parse_reward("tests=0.7,process=0.3"))
    return Dense() if arm == "dense" else None


class Arms:
    """One seed."""

    def __init__(self, home: Path, budget: Budget, seed: int) -> None:
        self.home, self.budget = home, budget
        self.bench = Bench(home, budget.scale, seed=seed)

    def measured(self, arm: str) -> dict[str, float]:
        """Of the held-out programs; made once."""
        path = self.home / f"arm-{arm}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        began, checkpoint = time.monotonic(), self.bench.warm()
        if arm != "start":
            checkpoint = self.bench.train(
                arm, checkpoint, steps=self.budget.steps, prompts=self.budget.prompts, fresh=GROUP,
                tasks=self.bench.tasks.train[self.budget.oracles :], reward=reward_of(arm),
            )  # fmt: skip
        runs = self.bench.evaluate(checkpoint, self.bench.tasks.held_out)
        failed = [earned(run) for run in runs if run.reward != 1]
        found = {
            "success": 100 * mean(run.reward or 0.0 for run in runs),
            "turns": mean(len(run.turns) for run in runs),
            "earned": mean(map(earned, runs)),
            "earned_failed": mean(failed) if failed else 0.0,
            "seconds": time.monotonic() - began,
        }
        found = {name: round(value, 2) for name, value in found.items()}
        path.write_text(json.dumps(found) + "\n")
        print(self.home.name, arm, found, flush=True)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rewards of the end, of the way behind it, and of both.")
    parser.add_argument("--out", type=Path, required=True, help="keep logs, checkpoints and results here")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="into docs/results/process_rewards.json")
    options = parse(parser, arguments, seeds=[0])
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        (home := options.out / f"seed-{seed}").mkdir(parents=True, exist_ok=True)
        arms = Arms(home, SMOKE if options.smoke else BUDGET, seed)
        rows.append({"seed": seed} | {arm: arms.measured(arm) for arm in ARMS})
    gains = {
        f"{arm} over {other}": [row[arm]["success"] - row[other]["success"] for row in rows]
        for arm, other in (
            ("tests", "start"), ("gated", "start"), ("dense", "start"), ("gated", "tests"), ("dense", "tests")
        )
    }  # fmt: skip
    over = {name: [round(x, 1) for x in over_seeds(found)] for name, found in gains.items() if len(found) > 1}
    print(json.dumps(over))
    if options.write:
        result = {"command": COMMAND, "over_seeds": over, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
