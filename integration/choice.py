"""Search or code: a tiny policy that is offered both learns which of them a question needs.

Half of the tasks of the suite `search`, view `fact_or_sum`, ask for a name in a library, the others for a
sum; there is time for one call, then the answer. The warm start imitates oracles, a fifth of which call the
other tool first and answer wrongly. From it GRPO trains, once with the rewards of the runs and once with
these dealt at random over the runs of a step. Measured at temperature 1 on held-out tasks: success, and how
often the first call is of the right tool; a policy that always calls one of them is right on half.

    python integration/choice.py --out FOLDER [--seeds 0 1 2 3 4] [--write]       docs/results/choice.json

Finished arms are read back from FOLDER; the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from capabilities import Capability, Experiment
from log_arms import over_seeds
from negative_controls import shuffled_rewards
from smoke import parse

from nano_coder.models.opening import local_policy
from nano_coder.run.execution import Runtime
from nano_rl.gather.rollouts import collect, execute, oracle_policy
from nano_shared.store import LogStore
from nano_shared.types import OracleAction, Task, Trajectory

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "choice.json"
ARMS = ("start", "trained", "random")
CHOICE = Capability(
    suite="search", view="fact_or_sum", tools=("search", "calculate"), demonstrations=480, steps=24,
    prompts=8, held_out=200, learning_rate=1e-4,
)  # fmt: skip
SMOKE: dict[str, Any] = {"demonstrations": 8, "epochs": 1.0, "steps": 1, "prompts": 1, "held_out": 4}


def right_tool(task: Task) -> str:
    return (task.oracle or ())[0].name


def misled(task: Task) -> Task:
    """The task with an oracle that calls the other tool, and answers what that says."""
    search = OracleAction(name="search", arguments={"pattern": "lamp"})
    other = OracleAction(name="calculate", arguments={"expression": "12 * 3 + 45"})
    wrong = search if right_tool(task) == "calculate" else other
    said = "81" if wrong is other else "amber"
    return task.model_copy(
        update={"oracle": (wrong, OracleAction(name="submit", arguments={"answer": said}))}
    )


class Choosing(Experiment):
    def without(self, task: Task) -> Task:
        return misled(task)

    def _shown(self, tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
        return execute(tasks, [oracle_policy(task, runtime.profile) for task in tasks], runtime)

    def measured(self, arm: str) -> dict[str, float]:
        """Percent of held-out tasks, and seconds; made once."""
        path = self.home / f"arm-{arm}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        started, policy = time.monotonic(), self._warm()
        if arm != "start":
            with shuffled_rewards() if arm == "random" else nullcontext():
                policy = self._train(arm, policy, self.tasks)
        runs = self._sampled(policy)
        called = [run.turns[0].calls[0].name if run.turns and run.turns[0].calls else "" for run in runs]
        wanted = [right_tool(run.task) for run in runs]
        found = {
            "success": 100 * mean(run.reward or 0.0 for run in runs),
            "right": 100 * mean(map(str.__eq__, called, wanted)),
            "constant": 100 * max(map(wanted.count, CHOICE.tools)) / len(wanted),
            "seconds": round(time.monotonic() - started),
        }  # fmt: skip
        path.write_text(json.dumps(found) + "\n")
        print(self.home.name, arm, found, flush=True)
        return found

    def _sampled(self, checkpoint: Path) -> list[Trajectory]:
        opened = self._opened(checkpoint)
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        with LogStore.open(self.home / "evaluation.db") as store:
            return collect(self.held_out, replace(self._runtime(store), policy=policy), seed=self.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A tiny policy learns to choose between search and code.")
    parser.add_argument("--out", type=Path, required=True, help="keep logs, checkpoints and results here")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--write", action="store_true", help="into docs/results/choice.json")
    options = parse(parser, arguments, seeds=[0])
    torch.set_num_threads(1)
    rows = []
    for seed in options.seeds:
        (home := options.out / f"choice-{seed}").mkdir(parents=True, exist_ok=True)
        choosing = Choosing(home, replace(CHOICE, **SMOKE) if options.smoke else CHOICE, seed)
        rows.append({"seed": seed} | {arm: choosing.measured(arm) for arm in ARMS})
    gains = {
        arm: [row[arm]["right"] - row[against]["constant" if arm == "trained" else "right"] for row in rows]
        for arm, against in (("trained", "trained"), ("random", "start"))
    }
    over = {arm: [round(x, 1) for x in over_seeds(found)] for arm, found in gains.items() if len(found) > 1}
    print(json.dumps(over))
    if options.write:
        command = "python integration/choice.py --out FOLDER --write"
        result = {"command": command, "over_seeds": over, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
