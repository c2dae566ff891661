"""What a verdict costs: our grader and `python -m pytest` on the same tasks, interleaved.

    python benchmarks/grading.py ROWS.jsonl [--tasks 60] [--rounds 1] [--concurrent 2] [--json]

ROWS are published rows with test files and reference solutions, MBPP+ for the stated bars. Latency is that of
one verdict at a time, each followed by one run of pytest; the rate is that of all verdicts, some at a time.
The other side writes solution and tests to a folder and runs them there, as graders without a jail do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nano_coder.grading.grade import grade
from nano_coder.sandbox import Sandbox, open_sandbox
from nano_rl.tasks.make import read_tasks
from nano_shared.errors import UsageError
from nano_shared.types import Task

_PAUSE_S = 0.05
"""between verdicts that are timed one at a time, so that the pool of jails is full again"""


def reference(task: Task) -> str:
    assert task.oracle is not None
    return str(task.oracle[0].arguments["content"])


def by_us(task: Task, sandbox: Sandbox) -> float | None:
    return grade(
        task, files={task.artifacts[0]: reference(task).encode()}, answer=None, sandbox=sandbox
    ).reward


def by_pytest(task: Task) -> bool:
    """The whole script as the body of one test."""
    assert task.hidden is not None
    assert task.hidden.suite is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / task.artifacts[0]).write_text(reference(task))
        for name, text in task.hidden.suite.files.items():
            (Path(folder) / name).write_text(text)
        runs = "\n".join(f"    runpy.run_path({name!r})" for name in task.hidden.suite.files)
        (Path(folder) / "test_suite.py").write_text(f"import runpy\n\n\ndef test_suite():\n{runs}\n")
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "test_suite.py",
        ]
        return subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode == 0


def timed(call: object) -> tuple[float, bool]:
    started = time.perf_counter()
    right = bool(call())  # type: ignore[operator]
    return time.perf_counter() - started, right


def measure(tasks: list[Task], sandbox: Sandbox, rounds: int, concurrent: int) -> dict[str, float]:
    for task in tasks[:3]:
        by_us(task, sandbox)
    ours, theirs, wrong = [], [], 0
    for task in tasks * rounds:
        time.sleep(_PAUSE_S)
        took, right = timed(lambda task=task: by_us(task, sandbox))
        ours.append(took)
        took, also = timed(lambda task=task: by_pytest(task))
        theirs.append(took)
        wrong += not (right and also)
    with ThreadPoolExecutor(concurrent) as pool:
        started = time.perf_counter()
        list(pool.map(lambda task: by_us(task, sandbox), tasks * rounds))
        rate = len(tasks) * rounds / (time.perf_counter() - started)
    return {
        "tasks": len(tasks), "wrong": wrong,
        "p50_ms": 1e3 * statistics.median(ours), "p95_ms": 1e3 * statistics.quantiles(ours, n=20)[-1],
        "per_second": rate, "pytest_p50_ms": 1e3 * statistics.median(theirs),
        "times_faster": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        tasks = [t for t in read_tasks(options.rows) if t.hidden and t.hidden.suite and t.oracle]
    except UsageError as error:
        sys.exit(f"benchmarks/grading.py: {error}")
    if len(tasks) < 2:
        sys.exit(f"benchmarks/grading.py: {options.rows} holds no two rows with test files and references")
    figures = measure(tasks[: options.tasks], open_sandbox(), options.rounds, options.concurrent)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:16} {value:10.1f}")


if __name__ == "__main__":
    main()
