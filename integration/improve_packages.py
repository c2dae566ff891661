"""What one cycle of `nano-rl improve` brings on packages that the model never saw (E4), beside its controls.

    python integration/improve_packages.py --out FOLDER [--packages funcy ...] [--seeds 0 1 2] [--write]

Each package and seed has a NANO_HOME of its own, where the command is typed as a user would, until its cycle
ends; the path of the project seeds the mutants. Its held-out bugs, planted, are then tried greedily by:

    before     the policy that the project had
    imitation  the adapter after imitation of oracles alone
    improve    the cycle's candidate
    random     policy gradients after that imitation, for as long as the cycle's if it had time for any, by
               rewards dealt at random
    other      the adapter that another package of this seed ended with, which never saw this one
    search     no model: random mutations of the places that a run is shown, with as many checks

Arms that FOLDER holds are not run again. --write leaves docs/results/improve_packages.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from log_arms import over_seeds
from negative_controls import shuffled_rewards
from own_project import nano
from smoke import TOY, parse, toy_package

from benchmarks.repair import CHECKS, searched
from nano_coder.agent.profiles import REPAIR_1
from nano_coder.config import AgentConfig
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_mining.releases import source_folder
from nano_rl.checkpoints.evaluate import Evaluation, TaskOutcome
from nano_rl.improve.cycle import outcomes_file
from nano_rl.improve.project import ImprovedProject, ProjectTask, open_project
from nano_rl.improve.tasks import TASKS
from nano_rl.improve.training import reinforce, trained_seconds
from nano_rl.tasks.code_places import SplitPart
from nano_rl.tasks.task_file import write_tasks
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Task

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "improve_packages.json"
PACKAGES = ("funcy==2.1", "jmespath==1.0.1", "simpleeval==1.0.3", "toolz==1.2.0", "sqlparse==0.6.1")
CHECK = (
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=src:. python -m pytest -q -x -o addopts= -p no:cacheprovider"
)
ARMS = ("before", "imitation", "improve", "random", "other", "search")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", default=PACKAGES, metavar="NAME==VERSION")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=40.0, help="of the cycle")
    parser.add_argument("--write", action="store_true")
    options = parse(parser, packages=[TOY], seeds=[0], minutes=0.4)
    if options.smoke:
        toy_package(options.out)
    works = [Work(options.out, package, seed) for seed in options.seeds for package in options.packages]
    for work in works:
        work.cycle(options.minutes, whole=not options.smoke)
        work.arms(smoke=options.smoke)
    for work in works:
        work.other([one for one in works if one.seed == work.seed and one.name != work.name])
    rows = [work.row() for work in works]
    for row in rows:
        print(json.dumps({name: row[name] for name in ("package", "seed", "said", "solved")}), flush=True)
    figures = differences(rows)
    print(json.dumps(figures, indent=1))
    if options.write:
        command = "python integration/improve_packages.py --out FOLDER"
        kept = {"command": command, "minutes": options.minutes, "figures": figures, "rows": rows}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


class Work:
    """One package and seed."""

    def __init__(self, out: Path, package: str, seed: int) -> None:
        self.out, self.package, self.seed = out, package, seed
        self.name = package.partition("==")[0]
        self.folder = out / f"{self.name}-{seed}"
        self.home, self.directory = self.folder / "home", self.folder / self.name
        if not self.directory.exists():
            shutil.copytree(source_folder(package, out), self.directory)
        self.file = self.folder / "arms.json"
        self.found: dict[str, dict[str, bool]] = {}
        if self.file.exists():
            self.found = json.loads(self.file.read_text())

    @property
    def project(self) -> ImprovedProject:
        os.environ["NANO_HOME"] = str(self.home)
        return open_project(self.directory)

    def cycle(self, minutes: float, *, whole: bool) -> None:
        """The first cycle, to its end where it is wanted `whole`."""
        while not (cycles := self.project.cycles()) or (whole and cycles[0].ended is None):
            how = ("--check", CHECK, "--minutes", minutes)
            nano(self.home, "nano-rl", "improve", "-C", self.directory, *how)

    def tasks(self, *parts: SplitPart) -> list[Task]:
        return [one.task for one in self.project.read(TASKS, ProjectTask) if one.part in parts]

    def arms(self, *, smoke: bool) -> None:
        cycle = self.project.cycles()[0]
        held = self.tasks(*SplitPart)[:1] if smoke else self.tasks(SplitPart.HELD_OUT)
        self.arm("search", lambda: self.search(held))
        if cycle.candidate is None:
            return
        imitated = cycle.candidate.removesuffix("-rl")
        self.arm("before", lambda: self.measured(cycle.baseline, held))
        self.arm("imitation", lambda: self.measured(imitated, held))
        self.arm("improve", lambda: self.measured(cycle.candidate, held))
        if (self.home / "checkpoints" / f"{imitated}-rl").exists() or smoke:
            self.arm("random", lambda: self.measured(self.at_random(imitated), held))

    def other(self, works: Sequence[Work]) -> None:
        if works and "improve" in works[0].found and "improve" in self.found:
            candidate = works[0].project.cycles()[0].candidate
            there = works[0].home / "checkpoints" / str(candidate)
            self.arm("other", lambda: self.measured(there, self.tasks(SplitPart.HELD_OUT)))

    def arm(self, name: str, measure: Callable[[], dict[str, bool]]) -> None:
        if name not in self.found:
            self.found[name] = measure()
            self.file.write_text(json.dumps(self.found, indent=1) + "\n")

    def measured(self, model: object, tasks: Sequence[Task]) -> dict[str, bool]:
        """Task -> whether the model does it, as the cycle measured it, or measured now."""
        known = {one.id: one for one in self.project.read(outcomes_file(str(model)), TaskOutcome)}
        if all(task.id in known for task in tasks):
            return {task.key: known[task.id].mean == 1 for task in tasks}
        write_tasks(file := self.folder / "held_out.jsonl", tasks)
        said = nano(self.home, "nano-rl", "eval", "--tasks", file, "--model", model, "--json")
        kept = self.home / "evaluations" / f"{json.loads(said)['evaluation']}.json"
        evaluation = Evaluation.model_validate_json(kept.read_bytes())
        return {one.key: one.mean == 1 for one in evaluation.tasks}

    def at_random(self, parent: str) -> str:
        """The checkpoint of policy gradients by rewards dealt at random, as long as those of the cycle."""
        name, tasks = f"{parent}-random", self.tasks(SplitPart.TRAIN)
        until = time.monotonic() + trained_seconds([f"{parent}-rl"])
        with shuffled_rewards():
            trained = reinforce(name, parent, tasks, AgentConfig(), until, print)
        return name if trained else parent

    def search(self, tasks: Sequence[Task]) -> dict[str, bool]:
        runtime = Runtime(
            policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=LogStore.open(), profile=REPAIR_1,
            policy_name="none", sampling=Sampling(),
        )  # fmt: skip
        places = {one.task.key: one.places for one in self.project.read(TASKS, ProjectTask)}
        found = {}
        for task in tasks:
            bug = {"kind": "fix", "line": 0, "places": places[task.key]}
            found[task.key] = searched(bug, task, runtime, CHECKS, self.folder)["search"] is not None
        return found

    def row(self) -> dict[str, Any]:
        cycle = self.project.cycles()[0]
        return {
            "package": self.package, "seed": self.seed, "said": cycle.said, "tasks": cycle.tasks,
            "held_out_places": cycle.places, "trained_seconds": round(cycle.trained_seconds),
            "promoted": bool(cycle.decision and cycle.decision.promoted),
            "solved": {arm: round(mean(self.found[arm].values()), 3) for arm in ARMS if self.found.get(arm)},
            "held_out": {arm: self.found[arm] for arm in ARMS if arm in self.found},
        }  # fmt: skip


def differences(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Of each arm minus each one before it: the mean over packages and seeds, and its 95 % interval."""
    found = {}
    for first, second in combinations(ARMS, 2):
        gains = [row["solved"][second] - row["solved"][first] for row in rows
                 if {first, second} <= row["solved"].keys()]  # fmt: skip
        if len(gains) > 1:
            found[f"{second} - {first}"] = tuple(round(value, 3) for value in over_seeds(gains))
    return found


if __name__ == "__main__":
    sys.exit(main())
