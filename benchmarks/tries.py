"""What `nano-coder run --tries` brings and what it costs: success and time of 1, 4 and 8 tries of each task.

    python benchmarks/tries.py [--model shipped] [--tasks 100] [--level 1-2] [--write] [--smoke]

Held-out tasks of the suite `functions`, at the temperature that `run --tries` takes. The numbers of tries run
one after another, as the command runs them: the first try that passes ends the others. Times are of whole
runs, grading included, without opening the model. --write leaves docs/results/tries.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from scipy.stats import binomtest

from nano_coder.config import SPREADING, CoreConfig
from nano_coder.models.opening import open_policy
from nano_coder.run.execution import Runtime, Stop, passed
from nano_coder.run.tries import run_tries
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.tasks.task_file import read_tasks
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Task

RESULT = Path(__file__).parents[1] / "docs" / "results" / "tries.json"
TRIES = (1, 4, 8)
BARS = {"pass at 8, times that at 1": 1.2, "time of 8, times that of 1": 4.0}


def tasks_of(level: str, count: int, folder: Path) -> list[Task]:
    made = folder / "tasks.jsonl"
    command = [sys.executable, "-m", "nano_rl", "tasks", "make", "--level", level, "-n", str(count)]
    subprocess.run([*command, "--seed", "3", "--split", "test", "--out", str(made)], check=True)
    return read_tasks(made)


def row_of(task: Task, runtime: Runtime, seed: int) -> dict[str, Any]:
    """Of each number of tries whether one passed, how many began, and seconds."""
    row: dict[str, Any] = {"task": task.key}
    for count in TRIES:
        began = time.monotonic()
        runs = run_tries(task, runtime, count, Stop(), seed=seed + count)
        seconds = time.monotonic() - began
        row[str(count)] = {"passed": any(map(passed, runs)), "began": len(runs), "seconds": round(seconds, 2)}
    return row


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {count: mean(row[count]["passed"] for row in rows) for count in map(str, TRIES)}
    seconds = {count: sum(row[count]["seconds"] for row in rows) for count in map(str, TRIES)}
    gained = sum(row["8"]["passed"] > row["1"]["passed"] for row in rows)
    lost = sum(row["8"]["passed"] < row["1"]["passed"] for row in rows)
    sure = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    return {
        "tasks": len(rows), "rates": rates, "seconds a task": {n: s / len(rows) for n, s in seconds.items()},
        "pass at 8, times that at 1": rates["8"] / max(rates["1"], 1e-9),
        "time of 8, times that of 1": seconds["8"] / seconds["1"],
        "median of the tasks' ratios": median(row["8"]["seconds"] / row["1"]["seconds"] for row in rows),
        "gained": gained, "lost": lost, "p": sure,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--level", default="1-2")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="two tasks")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, LogStore.open(f"{scratch}/log.db") as store:
        opened = open_policy(asked.model, CoreConfig())
        runtime = Runtime(
            policy=opened.policy, sandbox=open_sandbox(python=sys.executable), store=store,
            profile=opened.profile, policy_name=asked.model,
            sampling=Sampling(temperature=SPREADING, max_tokens=opened.profile.completion_tokens),
        )  # fmt: skip
        rows = []
        for number, task in enumerate(
            tasks_of(asked.level, 2 if asked.smoke else asked.tasks, Path(scratch))
        ):
            rows.append(row_of(task, runtime, 100 * number))
            print(task.key, *(f"{n}: {rows[-1][str(n)]}" for n in TRIES), flush=True)
    found = figures(rows)
    print(json.dumps(found, indent=1))
    for name, bar in BARS.items():
        print(f"{name}: {found[name]:.2f} (bar {bar})")
    if asked.write:
        machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        settings = {"model": asked.model, "level": asked.level, "temperature": SPREADING, "machine": machine}
        RESULT.write_text(json.dumps({**settings, **found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
