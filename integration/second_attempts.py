"""What a second attempt after a failed check is worth, and what it is worth to train it.

A tiny policy imitates first attempts, and runs; its failures are continued by a scripted correction, and
imitating those teaches the form of a second attempt. From these weights two trainings by GRPO:

    on     failed rollouts are forked, and their second attempts are groups beside the first ones (`reflect`)
    off    first attempts alone, about as many rollouts

Each policy has two tries at every held-out task, the second after a failure alone: one that reads its diff
and that the check failed, or a fresh one with another seed.

    python integration/second_attempts.py --out FOLDER --seeds 0 1 2    some ten minutes a seed on one thread
    python integration/second_attempts.py --out FOLDER --shipped        the shipped policy, taught alone
    python integration/second_attempts.py --out FOLDER --write          docs/results/second_attempts.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from log_arms import SMOKE, Bench, Scale, TaskSets, over_seeds
from smoke import parse

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import offered_tools, serving_profile
from nano_coder.models.opening import open_policy
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, can_reflect, grade_run, is_reflection, reflect_run
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.gather.rollouts import collect, runtime_for
from nano_rl.tasks.task_file import write_tasks
from nano_shared import snapshot
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, ToolCall, Trajectory
from nano_suites.drawing import make_tasks

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "second_attempts.json"
COMMAND = "python integration/second_attempts.py --out FOLDER --seeds 0 1 2"
STEPS, PROMPTS, SECOND = 24, 12, 4
FIRST = {"on": 4, "off": 12}
"""rollouts of a task"""
CORRECTED = 600
"""tasks whose failures are corrected for imitation"""
REPEATS = 4
"""first tries at a held-out task"""
SHIPPED_CORRECTED, SHIPPED_REPEATS, HELD_OUT = 320, 2, 120
SCALE = Scale(
    tasks=300 + CORRECTED + STEPS * PROMPTS, oracles=300, held_out=100, learning_rate=1e-4, max_tokens=32,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """As `Bench`, for the shipped policy, which is taught by a command."""

    home: Path
    seed: int
    tasks: TaskSets

    @classmethod
    def at(cls, home: Path, seed: int) -> Shipped:
        drawn = {
            split: make_tasks(levels=[2], n=n, seed=61 + seed, split=split, views=["fix", "repair"])
            for split, n in ((Split.TRAIN, SHIPPED_CORRECTED), (Split.TEST, HELD_OUT))
        }
        home.mkdir(parents=True, exist_ok=True)
        os.environ["NANO_HOME"] = str(home)
        return cls(
            home=home, seed=seed,
            tasks=TaskSets(train=drawn[Split.TRAIN], held_out=drawn[Split.TEST], families=[]),
        )  # fmt: skip

    def runtime(self, checkpoint: Path, store: LogStore) -> Runtime:
        opened = open_policy(str(checkpoint), dtype="bfloat16")
        return Runtime(
            policy=opened.policy, sandbox=open_sandbox(), store=store, profile=opened.profile,
            sampling=Sampling(temperature=1.0), policy_name=checkpoint.name,
        )  # fmt: skip

    def command(self, words: str) -> None:
        """Run `nano-rl`."""
        print("nano-rl", words, flush=True)
        command = [sys.executable, "-m", "nano_rl", *words.split(), "--set", "dtype=bfloat16"]
        subprocess.run(command, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    if options.shipped:
        _run_shipped(Shipped.at(options.out / "shipped", options.seeds[0]))
        return 0
    for seed in () if options.write else options.seeds:
        _run(options.out / f"seed-{seed}", seed, *((SMOKE, 1, 2, 4) if options.smoke else ()))
    row = report(options.out)
    if options.write:
        RESULTS.write_text(json.dumps({"command": COMMAND, **row}, indent=1) + "\n")
    return 0


def _run(
    home: Path, seed: int, scale: Scale = SCALE, steps: int = STEPS, prompts: int = PROMPTS,
    corrected: int = CORRECTED,
) -> None:  # fmt: skip
    bench = Bench(home, scale, seed=seed)
    warm = bench.warm()
    measured(bench, "warm", warm)
    behind = bench.tasks.train[scale.oracles :]
    with corrections(bench, warm, behind[:corrected]) as seconds:
        taught = bench.imitate("taught", warm, [seconds], steps=40, learning_rate=1e-3)
    measured(bench, "taught", taught)
    for arm, first in FIRST.items():
        trained = bench.train(
            arm, taught, steps=steps, prompts=prompts, fresh=first, tasks=behind[corrected:],
            reflect=SECOND if arm == "on" else 0,
        )  # fmt: skip
        measured(bench, arm, trained)


def _run_shipped(bench: Shipped) -> None:
    measured(bench, "warm", Path("shipped"))
    corrections(bench, Path("shipped"), bench.tasks.train[:SHIPPED_CORRECTED]).close()
    shown = bench.home / "shown.jsonl"
    write_tasks(shown, bench.tasks.train[:SHIPPED_CORRECTED:2])
    if not (bench.home / "checkpoints" / "taught").exists():
        bench.command(
            f"sft --model shipped --name taught --from-logs --log {bench.home}/corrected/log.db"
            f" --tasks {shown} --learning-rate 1e-4 --set batch=16"  # first tries are not to be forgotten
        )
    measured(bench, "taught", Path("taught"))


def corrections(bench: Bench | Shipped, checkpoint: Path, tasks: Sequence[Task]) -> LogStore:
    """A log of second attempts that a script made where the checkpoint failed."""
    folder = bench.home / "corrected"
    folder.mkdir(exist_ok=True)
    done, store = folder / "done", LogStore.open(folder / "log.db")
    if not done.exists():
        with LogStore.open(folder / "first.db") as first:
            runs = collect(tasks, bench.runtime(checkpoint, first), seed=bench.seed)
        within = bench.runtime(checkpoint, store)
        failures = [run for run in runs if can_reflect(run)]
        seconds = [second for run in failures if (second := corrected(run, within)) is not None]
        right = sum(run.reward == 1 for run in seconds)
        print(
            f"   {len(tasks)} tasks, {len(failures)} failed, {right} of {len(seconds)} corrected", flush=True
        )
        done.touch()
    return store


def corrected(failed: Trajectory, runtime: Runtime) -> Trajectory | None:
    """The second attempt of a script that writes the lines right which differ from the oracle's, and submits
    as it does; None where the failure is another."""
    task = failed.task
    lines = wrong_lines(failed, runtime)
    if lines is None:
        return None
    profile = serving_profile(runtime.profile, task)
    form, tools = DIALECTS[profile.dialect], offered_tools(profile, task)
    quotes = any(action.thought for action in task.oracle or ())
    said = [f"Wrong:\n{line}|{was}" if quotes else "" for path, line, was, new in lines]
    calls = [
        ToolCall(name="edit_file", arguments={"path": path, "line": line, "new": new})
        for path, line, was, new in lines
    ]
    texts = [form.render(thought, (call,), tools) for thought, call in zip(said, calls, strict=True)]
    last = (task.oracle or ())[-1]
    texts.append(form.render("", (ToolCall(name=last.name, arguments=last.arguments),), tools))
    within = replace(runtime_for(task, runtime), policy=ScriptedPolicy(texts), policy_name="script")
    return grade_run(reflect_run(failed, within), within)


def wrong_lines(failed: Trajectory, runtime: Runtime) -> list[tuple[str, int, str, str]] | None:
    """(file, number, line, right line) where the failed run's files differ from those of the oracle, whose
    edits are of single lines; None if files have other numbers of lines, or if some should differ and none
    does."""
    right = {path: text.split("\n") for path, text in failed.task.files.items()}
    for action in failed.task.oracle or ():
        if action.name == "edit_file":
            given = action.arguments
            right[str(given["path"])][int(given["line"]) - 1] = str(given["new"])
    entries = snapshot.load(str(failed.last_snapshot), runtime.store.blobs).by_path
    wrong = []
    for path, lines in right.items():
        entry = entries.get(path)
        found = runtime.store.get_blob(entry.content).decode().split("\n") if entry and entry.content else []
        if len(found) != len(lines):
            return None
        numbered = enumerate(zip(found, lines, strict=True), start=1)
        wrong += [(path, number, was, line) for number, (was, line) in numbered if line != was]
    return wrong if wrong or not right else None


def measured(bench: Bench | Shipped, name: str, checkpoint: Path) -> None:
    """Of each held-out task the share of first tries that passed, and of the second ones, of either kind."""
    path = bench.home / f"tries-{name}.json"
    repeats = SHIPPED_REPEATS if isinstance(bench, Shipped) else REPEATS
    if not path.exists():
        tasks = bench.tasks.held_out
        with LogStore.open(bench.home / "tries.db") as store:
            runtime = bench.runtime(checkpoint, store)
            runs = collect(tasks, runtime, group_size=repeats, seed=bench.seed, reflect=1)
            failures = Counter(run.task.key for run in runs if not is_reflection(run) and run.reward != 1)
            again = [task for task in tasks if failures[task.key]]
            sizes = [failures[task.key] for task in again]
            fresh = collect(again, runtime, group_size=sizes, seed=bench.seed + 1_000_000)
        rows = {task.key: {"first": 0.0, "reflected": 0.0, "fresh": 0.0} for task in tasks}
        for kind, of in (
            ("first", [run for run in runs if not is_reflection(run)]),
            ("reflected", [run for run in runs if is_reflection(run)]),
            ("fresh", fresh),
        ):
            for run in of:
                rows[run.task.key][kind] += (run.reward == 1) / repeats
        path.write_text(json.dumps(rows) + "\n")
    rows = json.loads(path.read_text())
    print(f"{bench.home.name} {name}: {_shown(rates(rows))}", flush=True)


def rates(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Shares of all first tries that passed, and of all failures that passed then."""
    first = mean(row["first"] for row in rows.values())
    seconds = {kind: mean(row[kind] for row in rows.values()) for kind in ("reflected", "fresh")}
    return {
        "first": first,
        **{kind: passed / (1 - first) if first < 1 else 0.0 for kind, passed in seconds.items()},
        **{f"two_{kind}": first + passed for kind, passed in seconds.items()},
    }


def _shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in found.items())


def report(out: Path) -> dict[str, Any]:
    """Each policy over the seeds that are done, and what reflection is worth, in points; printed as well."""
    homes = [home for home in sorted(out.glob("seed-*")) if (home / "tries-off.json").exists()]
    by_arm = {
        arm: [rates(json.loads((home / f"tries-{arm}.json").read_text())) for home in homes]
        for arm in ("warm", "taught", "on", "off")
    }
    rows = [
        {"policy": arm, **{name: [round(100 * one[name], 1) for one in found] for name in found[0]}}
        for arm, found in by_arm.items()
        if found
    ]
    worth = []
    if homes:
        beyond = {arm: [one["reflected"] - one["fresh"] for one in found] for arm, found in by_arm.items()}
        taught = [new - old for new, old in zip(beyond["taught"], beyond["warm"], strict=True)]
        tries = zip(by_arm["on"], by_arm["off"], strict=True)
        gains = {f"{arm}: a second attempt beyond a fresh one": each for arm, each in beyond.items()}
        gains["the same, taught beyond warm"] = taught
        gains["two tries: on with reflection beyond off with a fresh one"] = [
            on["two_reflected"] - off["two_fresh"] for on, off in tries
        ]
        worth = [{"what": what, **_interval(each)} for what, each in gains.items()]
    for row in (*rows, *worth):
        print(json.dumps(row))
    return {"seeds": len(homes), "rows": rows, "worth": worth}


def _interval(gains: Sequence[float]) -> dict[str, Any]:
    """Points over seeds; no interval of one."""
    gain, low, high = over_seeds(gains) if len(gains) > 1 else (gains[0], None, None)
    rounded = {"gain": gain, "low": low, "high": high}
    return {name: value if value is None else round(100 * value, 1) for name, value in rounded.items()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a second attempt is worth.")
    parser.add_argument("--out", type=Path, required=True, help="keep logs, checkpoints and results here")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--shipped", action="store_true", help="the shipped policy instead of tiny ones")
    parser.add_argument("--write", action="store_true", help="into docs/results/second_attempts.json")
    return parse(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
