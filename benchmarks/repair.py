"""What a local model mends under the profile repair-1: bugs in packages, with nothing told but the check.

    python benchmarks/repair.py --model coder-1.5b --work DIR [--packages humanize tabulate toolz] [--smoke]

Fetches the packages' sources, plants `--bugs` single mutations in each, each in a function of its own and
failing the package's tests, and writes them to DIR before anything runs. Each bug is tried greedily, then by
`--tries` runs at 0.7, and by a search without a model: random mutations of the same places in turn, with as
many checks as the arm before. Appends rows and settings to `--out`, and leaves out bugs that it holds.

    nano-rl tasks mine --releases boltons --out DIR/boltons.jsonl --log DIR/log.db
    python benchmarks/repair.py --model coder-repair --fixes DIR/*.jsonl --work DIR --tries 0 --out FIXES.json

does the same with real fixes: the check is the test file of the newer release on the source of the older.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from nano_coder.agent.profiles import find_profile
from nano_coder.config import CoreConfig
from nano_coder.models.opening import open_policy
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, Stop, grade_run, run_task
from nano_coder.run.tries import passed, run_tries
from nano_coder.sandbox.protocol import Jail, open_sandbox
from nano_coder.tools import repair
from nano_coder.tools.repair import ANSWERS, RepairPlace, find_places
from nano_coder.tools.tool import ToolContext
from nano_mining.releases import source_folder
from nano_rl.tasks.code_places import functions_of
from nano_rl.tasks.mutate import mutant_of, splices_by_function
from nano_rl.tasks.task_file import read_tasks
from nano_shared import snapshot
from nano_shared.errors import GivenUp
from nano_shared.hidden_checks import CommandChecks
from nano_shared.store import LogStore
from nano_shared.types import Limits, Sampling, Task, Trajectory

PACKAGES = {
    "boltons": ("26.2.0", "boltons", ""),
    "humanize": (
        "4.17.0",
        "src/humanize",
        "--ignore=tests/test_benchmarks.py --ignore=tests/test_time.py --ignore=tests/test_i18n.py",
    ),
    "inflection": ("0.5.1", "inflection", ""),
    "isodate": ("0.7.2", "src/isodate", ""),
    "parse": ("1.22.4", "parse", ""),
    "sqlparse": ("0.6.1", "sqlparse", ""),
    "tabulate": ("0.10.0", "tabulate", ""),
    "tinydb": ("4.9.0", "tinydb", ""),
    "toolz": ("1.2.0", "toolz", ""),
    "unidiff": ("1.0.1", "unidiff", ""),
}
"""name -> version, folder of the source, and options of its tests"""
DRAW = 3
"""the profile was settled on the bugs of draws 1 and 2"""
PROMPT = "The tests fail. Find the bug and correct it."
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "repair.json"
CHECKS = ANSWERS
"""of the search where no model runs: as many as a run may make"""
LIMITS = Limits(tool_seconds=120, memory_mb=2048, max_seconds=1800)


def check_of(name: str) -> str:
    options = PACKAGES[name][2]
    return f"PYTHONPATH=src:. python -m pytest -q -o addopts= -p no:cacheprovider {options}".strip()


def source_of(name: str, work: Path) -> Path:
    return source_folder(f"{name}=={PACKAGES[name][0]}", work)


def lines_seen() -> set[tuple[str, str, int]]:
    """Package, path and line of the recorded bugs of earlier draws."""
    blocks = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    earlier = [block for block in blocks if block["settings"].get("draw") != DRAW]
    return {(row["package"], row["path"], row["line"]) for block in earlier for row in block["rows"]}


def planted(name: str, work: Path, count: int) -> list[dict[str, Any]]:
    """The bugs of a package, drawn once: file, number of its lines, line, and the text of the line."""
    kept = work / f"{name}-{DRAW}-{count}.json"
    if kept.is_file():
        return list(json.loads(kept.read_text()))
    folder, bugs = source_of(name, work), list[dict[str, Any]]()
    functions = [
        (path, source, splices)
        for path in sorted((folder / PACKAGES[name][1]).rglob("*.py"))
        if "tests" not in path.parts and not path.name.startswith(("test_", "_version"))
        for source in (path.read_text(),)
        for splices in splices_by_function(source)
    ]
    draw, seen = random.Random(f"{name} {DRAW}"), lines_seen()
    draw.shuffle(functions)
    for path, source, splices in functions:
        kind = draw.choice(sorted({splice.kind for splice in splices}))
        mutant = mutant_of(source, draw.choice([splice for splice in splices if splice.kind == kind]))
        if mutant is None or (name, str(path.relative_to(folder)), mutant.line) in seen:
            continue
        if len(bugs) == count:
            break
        shutil.copytree(folder, broken := work / "broken", dirs_exist_ok=True)
        inner = str(path.relative_to(folder))
        (broken / inner).write_text(mutant.source)
        command = f"timeout -k 5 60 /bin/sh -c '{check_of(name)}'"
        done = subprocess.run(command, shell=True, cwd=broken, capture_output=True)
        shutil.rmtree(broken)
        if done.returncode == 1:
            facts = {"path": inner, "lines": len(source.splitlines())}
            facts |= {"line": mutant.line, "old": mutant.old, "new": mutant.new}
            bugs.append({"package": name, "kind": mutant.kind, **facts})
    kept.write_text(json.dumps(bugs, indent=1))
    return bugs


def fixes(files: Sequence[Path]) -> Iterator[tuple[dict[str, Any], Task]]:
    """The bug and the task of each mined fix. A run sees the test file that shows the bug, as its check."""
    for file in files:
        for task in read_tasks(file):
            hidden = task.hidden
            assert isinstance(hidden, CommandChecks)
            assert task.provenance is not None
            check = re.sub(r"(\S+?)::\S+( \1::\S+)*", r"\1", hidden.command)
            releases, _, places = task.provenance.source.partition(": ")
            edits = [action.arguments for action in task.oracle or () if action.name == "edit_file"]
            size = sum(str(edit.get("new", "")).count("\n") for edit in edits)
            bug: dict[str, Any]
            bug = {"package": releases.split()[0], "releases": releases, "path": task.key, "kind": "fix"}
            bug |= {"line": 0, "places": places.split(", "), "edits": len(edits), "size": size}
            yield bug, task.model_copy(update={
                "prompt": PROMPT, "check": check, "hidden": None, "oracle": (), "limits": LIMITS,
            })  # fmt: skip


def task_of(bug: dict[str, Any], work: Path, store: LogStore) -> Task:
    """The package with the bug in it."""
    folder = work / f"planted-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source_of(bug["package"], work), folder)
    lines = (folder / bug["path"]).read_text().split("\n")
    lines[bug["line"] - 1] = bug["new"]
    (folder / bug["path"]).write_text("\n".join(lines))
    start = snapshot.snapshot_directory(folder, store.blobs)
    shutil.rmtree(folder)
    key = f"{bug['package']}:{bug['path']}:{bug['line']}"
    return Task(key=key, prompt=PROMPT, snapshot=start, check=check_of(bug["package"]), limits=LIMITS)


def candidates(
    jail: Jail, places: tuple[RepairPlace, ...], draw: random.Random
) -> Iterator[tuple[str, str, str]]:
    """Path, text before and after, of random mutants of the places in turn."""
    left = []
    for place in places:
        source = jail.read(place.path).decode()
        inside = [
            s for splices in splices_by_function(source) for s in splices
            if place.first <= s.line <= place.last
        ]  # fmt: skip
        draw.shuffle(inside)
        left.append((place.path, source, inside))
    while any(inside for _, _, inside in left):
        for path, source, inside in left:
            if inside and (mutant := mutant_of(source, inside.pop())):
                yield path, source, mutant.source


def wrong_lines(bug: dict[str, Any], jail: Jail) -> Iterator[tuple[str, int, int]]:
    """Path, first and last line of the parts that hold the bug; of a fix, the functions that it changes."""
    if bug["kind"] != "fix":
        yield bug["path"], bug["line"], bug["line"]
    for one in bug.get("places", ()):
        path, _, changed = one.partition("::")
        if changed:
            for name, first, last, _ in functions_of(jail.read(path).decode()):
                if name == changed:
                    yield path, first, last


def searched(bug: dict[str, Any], task: Task, runtime: Runtime, checks: int, work: Path) -> dict[str, Any]:
    """The ranks of the place that holds the bug and of its line there, and how many checks a search without a
    model makes until one passes; None: not within `checks`."""
    row: dict[str, Any] = {"place": None, "likely": None, "search": None, "searched": checks}
    shutil.rmtree(folder := work / f"searched-{os.getpid()}", ignore_errors=True)
    start = task.snapshot or snapshot.snapshot_texts(task.files, runtime.store.blobs)
    snapshot.materialise(start, runtime.store.blobs, folder)
    jail = runtime.sandbox.open(folder, task.limits)
    try:
        context = ToolContext(jail=jail, limits=task.limits, check=task.check)
        places = tuple(dict.fromkeys(find_places(context, task.key, runtime.profile.places)))
        for rank, place in enumerate(places, 1):
            if any(place.path == path and place.first <= last and first <= place.last
                   for path, first, last in wrong_lines(bug, jail)):  # fmt: skip
                row["place"] = rank
                if bug["line"] in place.likely:
                    row["likely"] = 1 + place.likely.index(bug["line"])
                break
        mutants = candidates(jail, places, random.Random(task.key))
        for number, (path, before, after) in enumerate(islice(mutants, checks), 1):
            jail.write(path, after.encode())
            if jail.run(["/bin/sh", "-c", str(task.check)], timeout=120).ok:
                row["search"] = number
                break
            jail.write(path, before.encode())
    except GivenUp as reason:
        row["detail"] = str(reason)
    finally:
        jail.close()
        shutil.rmtree(folder, ignore_errors=True)
    return row


def figures(runs: list[Trajectory], seconds: float, bug: dict[str, Any]) -> dict[str, Any]:
    turns = [turn for run in runs for turn in run.turns]
    right = any(
        call["line"] == bug["line"] and call["text"].strip() == bug.get("old", "").strip()
        for turn in turns for one in turn.calls for call in one.arguments["edits"]  # type: ignore[union-attr]
    )  # fmt: skip
    return {
        "solved": any(map(passed, runs)),
        "original": right,
        "seconds": round(seconds, 1),
        "turns": len(turns),
        "checks": sum(turn.observations[0].exit_code is not None for turn in turns if turn.observations),
        "answers": [turn.completion.text for turn in turns],
    }


def measured(bug: dict[str, Any], task: Task, work: Path, runtime: Runtime, tries: int) -> dict[str, Any]:
    """The row of a bug."""
    row, checks = dict(bug), CHECKS
    if isinstance(runtime.policy, ScriptedPolicy):
        return row | searched(bug, task, runtime, checks, work)
    began = time.monotonic()
    greedy = replace(runtime, sampling=runtime.sampling.model_copy(update={"temperature": 0.0}))
    row["greedy"] = figures([grade_run(run_task(task, greedy), greedy)], time.monotonic() - began, bug)
    if tries:
        began = time.monotonic()
        runs = run_tries(task, runtime, tries, Stop(), seed=1)
        row["tries"] = figures(runs, time.monotonic() - began, bug)
    return row | searched(bug, task, runtime, row["tries" if tries else "greedy"]["checks"], work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="coder-1.5b", help="none: the search alone")
    parser.add_argument("--profile", default="repair-1")
    parser.add_argument("--packages", nargs="*", default=["humanize", "tabulate", "toolz"], choices=PACKAGES)
    parser.add_argument("--fixes", type=Path, nargs="*", help="files of `nano-rl tasks mine --releases`")
    parser.add_argument("--bugs", type=int, default=6, help="of each package")
    parser.add_argument("--tries", type=int, default=4, help="0: greedy alone")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="of a run, at most")
    parser.add_argument("--work", type=Path, required=True, help="folder for sources, bugs and the log")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="one bug of one package")
    asked = parser.parse_args()
    repair.ANSWERS = asked.answers
    names, tries = (["inflection"], 0) if asked.smoke else (asked.packages, asked.tries)
    asked.work.mkdir(parents=True, exist_ok=True)
    tasks: list[tuple[dict[str, Any], Task | None]]
    if asked.fixes:
        tasks = [*fixes(asked.fixes)]
    else:
        drawn = [planted(name, asked.work, 1 if asked.smoke else asked.bugs) for name in names]
        tasks = [(bug, None) for one_each in zip_longest(*drawn) for bug in one_each if bug is not None]
    profile = find_profile(asked.profile)
    config = CoreConfig(profile=asked.profile)
    policy = ScriptedPolicy([]) if asked.model == "none" else open_policy(asked.model, config).policy
    store = LogStore.open(str(asked.work / "log.db"))
    runtime = Runtime(
        policy=policy, sandbox=open_sandbox(python=sys.executable), store=store, profile=profile,
        policy_name=asked.model, sampling=Sampling(temperature=0.7, max_tokens=profile.completion_tokens),
    )  # fmt: skip
    settings = {
        "model": asked.model, "policy": policy.id, "profile": profile.name, "hash": profile.hash,
        "draw": DRAW, "answers": asked.answers, "tries": tries, "temperature": 0.7,
        "machine": f"{platform.machine()}, {platform.python_version()}",
    }  # fmt: skip
    if not asked.fixes:
        settings["versions"] = {name: PACKAGES[name][0] for name in sorted(names)}
    results = json.loads(asked.out.read_text()) if asked.out.is_file() else []
    block = next((one for one in results if one["settings"] == settings), None)
    if block is None:
        results.append(block := {"settings": settings, "rows": []})
    done = {(row["package"], row["path"], row["line"]) for row in block["rows"]}
    for bug, task in tasks:
        if (bug["package"], bug["path"], bug["line"]) in done:
            continue
        row = measured(bug, task or task_of(bug, asked.work, store), asked.work, runtime, tries)
        block["rows"].append(row)
        asked.out.write_text(json.dumps(results, indent=1) + "\n")
        arms = [arm for arm in ("greedy", "tries") if arm in row]
        told = [f"{arm} {row[arm]['solved']} in {row[arm]['seconds']} s" for arm in arms]
        where = f"{bug['package']} {bug['path']}:{bug['line']} place {row['place']}:"
        print(where, *told, f"search {row['search']}", flush=True)
    rows = block["rows"]
    for arm in ("greedy", "tries"):
        if found := [row[arm]["solved"] for row in rows if arm in row]:
            print(f"{arm} {sum(found)} of {len(found)}")
    print(f"shown {sum(row['place'] is not None for row in rows)} of {len(rows)}")
    print(f"search {sum(row['search'] is not None for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
