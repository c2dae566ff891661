"""Whether asking a strong model teaches the local one: two days of bugs in a package, and a night between.

    python integration/escalation.py --out FOLDER [--packages toolz ...] [--seeds 0 1 2] [--runs 40] [--write]

By day each bug, planted in a function of its own, goes to the local policy under repair-1; where the check
fails after `--answers` edits, an API gets the task, a server on this machine that plays the bug's solution.
By night the policy imitates the runs of the API that passed, and nothing else (`nano-rl tasks from-log`,
`sft`). Measured is the share of a day's bugs that the local policy solved. The policy of the first day tries
those of the second too: what the night brought is the difference. --write: docs/results/escalation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from improve_packages import CHECK
from judge_server import Server, serving
from log_arms import over_seeds
from own_project import nano
from smoke import TOY, parse, toy_package

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import REPAIR_1, hosted_profile
from nano_coder.config import AgentConfig
from nano_coder.models.opening import open_policy
from nano_coder.run.execution import RunSettings, Runtime, escalate_run
from nano_coder.run.tries import passed
from nano_coder.sandbox.protocol import open_sandbox
from nano_mining.releases import source_folder
from nano_rl.gather.rollouts import collect
from nano_rl.tasks.mutate import mutant_of, splices_by_function
from nano_shared import snapshot
from nano_shared.store import LogStore
from nano_shared.types import Limits, Sampling, Task

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "escalation.json"
PACKAGES = ("funcy==2.1", "toolz==1.2.0", "voluptuous==0.16.0")
PROMPT = "The tests fail. Find the bug and fix it."
EPOCHS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", default=PACKAGES, metavar="NAME==VERSION")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=int, default=40, help="of a day")
    parser.add_argument("--answers", type=int, default=6, help="of the local policy to a bug")
    parser.add_argument("--model", default="shipped", help="the local policy")
    parser.add_argument("--write", action="store_true")
    options = parse(parser, packages=[TOY], seeds=[0], runs=1, answers=1)
    if options.smoke:
        toy_package(options.out)
        torch.set_num_threads(1)  # a process that is forked has no others
        options.model = build_tiny(options.out / "tiny", [REPAIR_1.task], hidden=32, layers=1, vocab_size=300)
    rows = []
    for seed in options.seeds:
        for package in options.packages:
            rows.append(Days(options, package, seed).row())
            print(json.dumps(rows[-1]), flush=True)
    gains = [row["second_day"] - row["second_day_without_the_night"] for row in rows]
    figures = [round(value, 3) for value in over_seeds(gains)] if len(gains) > 1 else gains
    print("what a night brings:", *figures)
    if options.write:
        command = "python integration/escalation.py --out FOLDER"
        kept = {"command": command, "runs": options.runs, "answers": options.answers}
        RESULTS.write_text(json.dumps({**kept, "night_brings": figures, "rows": rows}, indent=1) + "\n")
    return 0


class Days:
    """A package and a seed."""

    def __init__(self, options: argparse.Namespace, package: str, seed: int) -> None:
        self.package, self.seed, out = package, seed, options.out
        self.runs, self.answers, self.model = options.runs, options.answers, str(options.model)
        self.folder = out / f"{package.partition('==')[0]}-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.source, self.file = source_folder(package, out), self.folder / "days.json"
        self.log = self.folder / "home" / "log.db"
        self.log.parent.mkdir(exist_ok=True)
        self.store, self.sandbox = LogStore.open(str(self.log)), open_sandbox()
        self.limits = Limits(tool_seconds=120, memory_mb=2048, max_seconds=1800)
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def row(self) -> dict[str, Any]:
        bugs = list(self.bugs())
        first, second = bugs[: self.runs], bugs[self.runs :]
        day = self.day("first day", self.model, first, asks=True)
        if "night" not in self.found:
            self.keep("night", self.night(day["taught"]))
        after = self.day("second day", "night", second, asks=True)
        without = self.day("second day without the night", self.model, second, asks=False)
        return {
            "package": self.package, "seed": self.seed, "bugs": [len(first), len(second)],
            "taught": len(day["taught"]), "first_day": mean(day["local"]), "second_day": mean(after["local"]),
            "second_day_without_the_night": mean(without["local"]), "asked": [day["asked"], after["asked"]],
        }  # fmt: skip

    def keep(self, name: str, value: Any) -> Any:
        self.found[name] = value
        self.file.write_text(json.dumps(self.found, indent=1) + "\n")
        return value

    def bugs(self) -> Iterator[Task]:
        """Bugs that the package's tests show, each in a function of its own as long as there are some."""
        kept = self.folder / "bugs.json"
        found: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
        if not found:
            draw = random.Random(f"{self.package} {self.seed}")
            functions = [
                (path, source, draw.sample(splices, len(splices)))
                for path in sorted(self.source.rglob("*.py"))
                if not {"tests", "test", "docs", "setup.py"} & set(path.relative_to(self.source).parts)
                for source in (path.read_text(),)
                for splices in splices_by_function(source)
            ]
            draw.shuffle(functions)
            rounds = zip_longest(*([(p, s, one) for one in splices] for p, s, splices in functions))
            for path, source, splice in (one for some in rounds for one in some if one is not None):
                mutant = mutant_of(source, splice)
                if mutant is not None and self.fails(
                    inner := str(path.relative_to(self.source)), mutant.source
                ):
                    found.append({"path": inner, "line": mutant.line, "old": mutant.old, "new": mutant.new})
                if len(found) == 2 * self.runs:
                    break
            kept.write_text(json.dumps(found, indent=1))
        yield from map(self.task, found)

    def fails(self, path: str, text: str) -> bool:
        jail = self.sandbox.open(self.source, self.limits)
        try:
            jail.write(path, text.encode())
            done = jail.run(["/bin/sh", "-c", CHECK], timeout=60)
        finally:
            jail.close()
        return done.exit_code == 1

    def task(self, bug: dict[str, Any]) -> Task:
        shutil.rmtree(folder := self.folder / "planted", ignore_errors=True)
        shutil.copytree(self.source, folder)
        lines = (folder / bug["path"]).read_text().split("\n")
        lines[bug["line"] - 1] = bug["new"]
        (folder / bug["path"]).write_text("\n".join(lines))
        start = snapshot.snapshot_directory(folder, self.store.blobs)
        solution = [
            {"name": "edit_file", "arguments": {"path": bug["path"], "line": bug["line"], "new": bug["old"]}},
            {"name": "submit", "arguments": {}},
        ]
        limits = self.limits.model_copy(update={"max_turns": self.answers})
        return Task.model_validate({
            "key": f"{bug['path']}:{bug['line']}:{self.seed}", "prompt": PROMPT, "snapshot": start,
            "check": CHECK, "limits": limits, "oracle": solution,
        })  # fmt: skip

    def day(self, name: str, model: str, bugs: Sequence[Task], *, asks: bool) -> dict[str, Any]:
        """Which bugs the local policy solved, how many the API was asked for, and its runs that passed."""
        if name in self.found:
            return dict(self.found[name])
        os.environ["NANO_HOME"] = str(self.log.parent)
        opened = open_policy(model, AgentConfig(profile=REPAIR_1.name))
        runtime = Runtime(
            policy=opened.policy, sandbox=self.sandbox, store=self.store, profile=REPAIR_1, policy_name=model,
            sampling=Sampling(temperature=0.0, max_tokens=REPAIR_1.completion_tokens),
            settings=RunSettings(ends_repetition=True),
        )  # fmt: skip
        runs = collect(bugs, runtime)
        taught = []
        with serving(OracleServer()) as server:
            config = AgentConfig(base_url=server.url, api_key="none")
            hosted = replace(
                runtime, policy=open_policy("openai:oracle", config).policy, policy_name="openai:oracle",
                profile=hosted_profile(REPAIR_1), sampling=Sampling(max_tokens=512),
            )  # fmt: skip
            for task, run in zip(bugs, runs, strict=True):
                if asks and not passed(run):
                    server.solution = [one.model_dump(mode="json") for one in task.oracle or ()]
                    more = run.task.model_copy(update={"limits": self.limits})
                    asked = escalate_run(run.model_copy(update={"task": more}), hosted)
                    taught += [asked.id] if passed(asked) else []
        local = [passed(run) for run in runs]
        return dict(self.keep(name, {"local": local, "asked": local.count(False), "taught": taught}))

    def night(self, taught: Sequence[str]) -> str:
        home, file = self.log.parent, self.folder / "taught.jsonl"
        self.store.close()  # a process that is forked may not share it
        nano(home, "nano-rl", "tasks", "from-log", *taught, "--out", file)
        how = ("--model", self.model, "--epochs", EPOCHS)
        nano(home, "nano-rl", "sft", "--tasks", file, "--name", "night", *how, NANO_PROFILE=REPAIR_1.name)
        self.store = LogStore.open(str(self.log))
        return "night"


class OracleServer(Server):
    """Answers with the next call of a solution."""

    def __init__(self) -> None:
        super().__init__(str)
        self.solution: Sequence[dict[str, Any]] = ()
        self.numbers = count()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        done = sum(message["role"] == "assistant" for message in asked["messages"])
        step = self.solution[min(done, len(self.solution) - 1)]
        function = {"name": step["name"], "arguments": json.dumps(step["arguments"])}
        call = {"id": f"call_{next(self.numbers)}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "id": "1", "object": "chat.completion", "created": 1, "model": "oracle",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
