"""The verifier of an exported task: a standalone script that runs in Harbor's container, without nano.

    python3 nano_grade.py CHECKS WORKSPACE REWARD

reads the checks, grades the workspace and writes 1 or 0 (for a reward file, the reward of the command).
Values are computed in a child process and compared in this one. It runs in the same container as the agent,
so that it resists tampering less than `nano-rl grade`, which uses a fresh jail.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ANSWER = "answer.txt"
SECONDS = 120
CHILD = """
import importlib.util, json, sys
nonce, path, entry, case = json.load(sys.stdin)
sys.path.insert(0, path.rpartition("/")[0])
spec = importlib.util.spec_from_file_location("solution", path)
module = importlib.util.module_from_spec(spec)
sys.modules["solution"] = module
spec.loader.exec_module(module)
value = getattr(module, entry)(*case["args"], **case["kwargs"])
sys.stdout.flush()
print("\\n" + nonce + json.dumps(value), flush=True)
"""
RUNNERS = {
    "script": ["{file}"], "doctest": ["-m", "doctest", "{file}"], "unittest": ["-m", "unittest", "{file}"],
    "pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "{file}"],
}  # fmt: skip


def main(checks: str, workspace: str, reward: str) -> None:
    job = json.loads(Path(checks).read_text(encoding="utf-8"))
    work = Path(workspace)
    text = str(GRADERS[job["kind"]](job, work))
    Path(reward).parent.mkdir(parents=True, exist_ok=True)
    Path(reward).write_text(text, encoding="utf-8")


def answer(job: dict[str, Any], work: Path) -> int:
    return int(_same_answer(work, job["answer"]))


def cases(job: dict[str, Any], work: Path) -> int:
    return int(all(_case(job, work, case) for case in job["cases"]))


def command(job: dict[str, Any], work: Path) -> int:
    _lay(job["files"], work)
    return int(_run(["/bin/sh", "-c", job["command"]], work))


def reward_file(job: dict[str, Any], work: Path) -> float:
    path = work / job["reward_path"]
    path.unlink(missing_ok=True)
    _lay(job["files"], work)
    _run(["/bin/sh", "-c", job["command"]], work)
    value = json.loads(path.read_text(encoding="utf-8"))
    return float(value["reward"] if isinstance(value, dict) else value)


def suite(job: dict[str, Any], work: Path) -> int:
    return int(all(_suite(job["suite"], name, work) for name in job["suite"]["files"]))


def state(job: dict[str, Any], work: Path) -> int:
    return int(all(_state(fact, work) for fact in job["state"]))


def mutants(job: dict[str, Any], work: Path) -> int:
    """The agent's tests pass on the right source and fail on every wrong one."""
    sources = [(job["reference"], True), *((source, False) for source in job["mutants"].values())]
    return int(all(_tests_pass(job, work, source) is wanted for source, wanted in sources))


GRADERS = {f.__name__: f for f in (answer, cases, command, reward_file, suite, state, mutants)}


def _case(job: dict[str, Any], work: Path, case: dict[str, Any]) -> bool:
    nonce = secrets.token_hex(16)
    request = json.dumps([nonce, str(work / job["target"]), job["entry_point"], case])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", CHILD], input=request, capture_output=True, text=True, cwd=work,
            timeout=10, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    reports = [line for line in done.stdout.split("\n") if line.startswith(nonce)]
    return len(reports) == 1 and _same(json.loads(reports[0][len(nonce) :]), case["expected"])


def _suite(suite: dict[str, Any], name: str, work: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        _lay(suite["files"], Path(folder))
        argv = [part.format(file=str(Path(folder) / name)) for part in RUNNERS[suite["framework"]]]
        return _run([sys.executable, *argv], work, PYTHONPATH=f"{work}{os.pathsep}{folder}")


def _tests_pass(job: dict[str, Any], work: Path, source: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "work"
        shutil.copytree(work, copy, symlinks=True)
        _lay({job["module"]: source}, copy)
        return _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *job["tests"]], copy)


def _run(argv: list[str], work: Path, **env: str) -> bool:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | env
    try:
        return subprocess.run(argv, cwd=work, env=environment, timeout=SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _lay(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


def _state(fact: dict[str, Any], work: Path) -> bool:
    if fact["kind"] == "answer":
        return _same_answer(work, fact["expected"])
    path = work / fact["path"]
    if fact["kind"] == "absent":
        return not os.path.lexists(path)
    if path.is_symlink() or not path.is_file():
        return False
    try:
        return _same_rows(_found(fact, path), fact)
    except (OSError, ValueError, csv.Error, sqlite3.Error):
        return False


def _found(fact: dict[str, Any], path: Path) -> Any:
    if fact["kind"] == "sql":
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            return [list(row) for row in database.execute(fact["query"])]
    text = path.read_text(encoding="utf-8")
    if fact["kind"] == "json":
        return json.loads(text)
    return list(csv.reader(text.splitlines())) if fact["kind"] == "csv" else text


def _same_rows(found: Any, fact: dict[str, Any]) -> bool:
    expected = fact["expected"]
    if fact["kind"] in ("csv", "sql") and not fact["ordered"]:
        found, expected = sorted(found, key=json.dumps), sorted(expected, key=json.dumps)
    return _same(found, expected)


def _same(given: Any, expected: Any) -> bool:
    """Equal in value and in exact type, all the way down."""
    if type(given) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(given) == len(expected) and all(map(_same, given, expected))
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_same(given[key], expected[key]) for key in expected)
    return bool(given == expected)


def _same_answer(work: Path, expected: Any) -> bool:
    path = work / ANSWER
    if path.is_symlink() or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8").strip()
    readings: list[Any] = [text]
    for read in (json.loads, ast.literal_eval):
        try:
            readings.append(read(text))
        except (ValueError, SyntaxError, RecursionError):
            continue
    if isinstance(expected, str):
        return any(isinstance(r, str) and r.strip() == expected.strip() for r in readings)
    return any(_same(reading, expected) for reading in readings)


if __name__ == "__main__":
    main(*sys.argv[1:])
