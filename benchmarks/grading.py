"""What a verdict costs: our grader and `python -m pytest` on the same tasks, interleaved.

    python benchmarks/grading.py ROWS.jsonl [--tasks N] [--rounds 1] [--concurrent 2] [--slow 2] [--json]

ROWS are published rows with test files and reference solutions, MBPP+ for the stated bars; every row is
graded unless --tasks says how many, spread evenly over the file. Latency is that of one verdict at a time,
each followed by two runs of pytest: as it is, and without the plugins that happen to be installed. That side
writes solution and tests to a folder and runs them there, as graders without a jail do.

The rate is that of all verdicts, some at a time. A reference that itself computes for longer than --slow
seconds would decide the rate of everything: such tasks are named, their times are told, they stay in the
latencies, and `per_second_all` is the rate with them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_rl.tasks.task_file import read_tasks
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import SuiteChecks
from nano_shared.types import Task

_PAUSE_S = 0.05
"""between verdicts that are timed one at a time, so that the pool of jails is full again"""
_BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def reference(task: Task) -> str:
    assert task.oracle is not None
    return str(task.oracle[0].arguments["content"])


def by_us(task: Task, sandbox: Sandbox) -> float | None:
    return grade(
        task, files={task.artifacts[0]: reference(task).encode()}, answer=None, sandbox=sandbox
    ).reward


def by_pytest(task: Task, environment: dict[str, str]) -> bool:
    """The whole script as the body of one test."""
    assert isinstance(task.hidden, SuiteChecks)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / task.artifacts[0]).write_text(reference(task))
        for name, text in task.hidden.suite.files.items():
            (Path(folder) / name).write_text(text)
        runs = "\n".join(f"    runpy.run_path({name!r})" for name in task.hidden.suite.files)
        (Path(folder) / "test_suite.py").write_text(f"import runpy\n\n\ndef test_suite():\n{runs}\n")
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull]
        argv = [sys.executable, "-m", "pytest", *options, "test_suite.py"]
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, check=False, env={**os.environ, **environment}
        )
        return done.returncode == 0


def timed(call: Callable[[], object]) -> tuple[float, bool]:
    started = time.perf_counter()
    right = bool(call())
    return time.perf_counter() - started, right


def rate(tasks: list[Task], sandbox: Sandbox, concurrent: int) -> float:
    """Verdicts a second."""
    with ThreadPoolExecutor(concurrent) as pool:
        started = time.perf_counter()
        list(pool.map(lambda task: by_us(task, sandbox), tasks))
        return len(tasks) / (time.perf_counter() - started)


def measure(
    tasks: list[Task], sandbox: Sandbox, rounds: int, concurrent: int, slow: float
) -> dict[str, float | dict[str, float]]:
    for task in tasks[:3]:
        by_us(task, sandbox)
    took: dict[str, list[float]] = {"ours": [], "pytest": [], "bare": []}
    longest: dict[str, float] = {}
    wrong = 0
    for task in tasks * rounds:
        time.sleep(_PAUSE_S)
        own, right = timed(lambda task=task: by_us(task, sandbox))  # type: ignore[misc]
        theirs, also = timed(lambda task=task: by_pytest(task, {}))  # type: ignore[misc]
        bare, _ = timed(lambda task=task: by_pytest(task, _BARE))  # type: ignore[misc]
        for name, value in (("ours", own), ("pytest", theirs), ("bare", bare)):
            took[name].append(value)
        longest[task.key] = max(own, longest.get(task.key, 0.0))
        wrong += not (right and also)
    # a task is slow where its reference is: by either side's time, the shorter one
    plain = dict(zip((task.key for task in tasks), took["bare"], strict=False))
    apart = {key: s for key, s in longest.items() if min(s, plain[key]) > slow}
    usual = [task for task in tasks if task.key not in apart] * rounds

    def times_faster(other: str) -> float:
        return statistics.median(t / o for t, o in zip(took[other], took["ours"], strict=True))

    return {
        "tasks": len(tasks), "wrong": wrong,
        "p50_ms": 1e3 * statistics.median(took["ours"]),
        "p95_ms": 1e3 * statistics.quantiles(took["ours"], n=20)[-1],
        "per_second": rate(usual, sandbox, concurrent),
        "per_second_all": rate(tasks * rounds, sandbox, concurrent) if apart else math.nan,
        "pytest_p50_ms": 1e3 * statistics.median(took["pytest"]), "times_faster": times_faster("pytest"),
        "bare_pytest_p50_ms": 1e3 * statistics.median(took["bare"]),
        "times_faster_than_bare": times_faster("bare"), "slow_s": apart,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tasks", type=int, default=None, help="how many of them; default all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--slow", type=float, default=2.0, help="seconds from which a reference is apart")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        tasks = [t for t in read_tasks(options.rows) if isinstance(t.hidden, SuiteChecks) and t.oracle]
    except UsageError as error:
        sys.exit(f"benchmarks/grading.py: {error}")
    if len(tasks) < 2:
        sys.exit(f"benchmarks/grading.py: {options.rows} holds no two rows with test files and references")
    if options.tasks is not None and 2 <= options.tasks < len(tasks):
        tasks = [tasks[i * len(tasks) // options.tasks] for i in range(options.tasks)]
    figures = measure(tasks, open_sandbox(), options.rounds, options.concurrent, options.slow)
    if options.json:
        print(json.dumps({name: None if value != value else value for name, value in figures.items()}))
        return
    for name, value in figures.items():
        if isinstance(value, dict):
            told = ", ".join(f"{key} {seconds:.1f} s" for key, seconds in value.items())
            print(f"apart from per_second, since their references are slow: {told or 'none'}")
        elif value == value:
            print(f"{name:24} {value:10.1f}")


if __name__ == "__main__":
    main()
