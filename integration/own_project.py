# ruff: noqa: E501 (a row of the table is a line)
"""The headline as it is typed: nano-coder on five bugs of one's own project, then a bare `train --from-logs`.

Every command is one of the README's, run as a process in a fresh NANO_HOME. The project has 44 small
functions. Five are broken where the user works: a wrong sign, a bound that is off by one (above, below), a
wrong name, the largest for the least. Those of the other modules, each broken in one of these ways, are
siblings that neither the runs nor the training see; the shipped policy and the trained one are run on them.
The training makes mutants of the five modules; a sibling that starts like one of them would be left out.

    python integration/own_project.py --out FOLDER --seeds 0 1 2

A seed that FOLDER/results.json holds is not run again, and a training that was stopped goes on. The last line is
the gain and its interval over seeds; the exit code is 1 where that reaches 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from smoke import parse

PROMPT, CHECK = "The tests fail. Find the bug and fix it.", "python -m pytest -q"
OURS = ("end_of", "adults", "failed", "pay", "cheapest")
"""the functions that are broken where the user works"""
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""of Student's t, by degrees of freedom"""
# module | function | arguments | what it returns | how | right >> wrong | calls that its test makes
ROWS = [line.split("|") for line in """
prices|add_tax|price, rate|the price with rate percent of tax added|price + price * rate // 100|+ price >> - price|200, 10 ; 50, 20
prices|take_off|price, rate|the price with rate percent taken off|price - price * rate // 100|- price >> + price|200, 10 ; 50, 20
cart|with_fee|amounts, fee|the sum of the amounts plus the fee|sum(amounts) + fee|+ fee >> - fee|[5, 7], 2 ; [], 3
cart|change_due|paid, cost|what is left of the money paid after the cost|paid - cost|- cost >> + cost|20, 12 ; 5, 5
stock|after_sale|stock, sold|how many pieces are left after some were sold|stock - sold|- sold >> + sold|9, 4 ; 3, 1
stock|delivered|stock, boxes, size|the stock after boxes of that size came|stock + boxes * size|+ boxes >> - boxes|4, 2, 6 ; 0, 1, 5
clock|minutes_between|start, end|the minutes from start to end|end - start|- start >> + start|10, 45 ; 30, 40
clock|end_of|start, length|the minute at which a meeting ends|start + length|+ length >> - length|60, 30 ; 5, 1
bank|deposit|balance, amount|the balance after an amount was paid in|balance + amount|+ amount >> - amount|10, 5 ; 0, 7
bank|withdraw|balance, amount|the balance after an amount was paid out|balance - amount|- amount >> + amount|10, 5 ; 8, 7
score|lead|ours, theirs|how many points we are ahead|ours - theirs|- theirs >> + theirs|8, 5 ; 4, 4
score|with_bonus|points, bonus|the points with the bonus added|points + bonus|+ bonus >> - bonus|8, 5 ; 4, 4
shipping|is_free|total|whether shipping is free, which it is from 50 on|total >= 50|>= >> >|50 ; 49 ; 80
shipping|heavy|weights|the weights that are above 20|[w for w in weights if w > 20]|> 20 >> >= 20|[20, 21, 5] ; [20]
people|adults|ages|the ages that are at least 18|[age for age in ages if age >= 18]|>= >> >|[17, 18, 40] ; [18]
people|children|ages|the ages below 12|[age for age in ages if age < 12]|< >> <=|[12, 3, 11] ; [12]
grades|passed|points|how many of the points are at least 50|len([p for p in points if p >= 50])|>= >> >|[50, 49, 90] ; [50]
grades|failed|points|how many of the points are below 50|len([p for p in points if p < 50])|< >> <=|[50, 49, 90] ; [50]
rooms|fits|guests, seats|whether the guests have seats, one each|guests <= seats|<= >> <|4, 4 ; 5, 4 ; 1, 3
rooms|too_small|sizes, guests|the sizes that are less than the guests|[s for s in sizes if s < guests]|< >> <=|[4, 6, 8], 6 ; [2], 2
weights|light|items|the items that weigh less than 5|[item for item in items if item < 5]|< >> <=|[5, 4, 6] ; [5]
weights|limit_kept|load|whether a load is at most 100|load <= 100|<= >> <|100 ; 101 ; 5
games|may_play|age|whether somebody is old enough, which is from 6 on|age >= 6|>= >> >|6 ; 5 ; 30
games|high|points|the points that are at least 1000|[p for p in points if p >= 1000]|>= >> >|[1000, 999] ; [5]
boxes|area|width, height|the area of a rectangle|width * height|* height >> * width|3, 4 ; 5, 2
boxes|volume|width, height, depth|the volume of a box|width * height * depth|* depth >> * height|2, 3, 4 ; 1, 5, 2
names|full_name|first, last|both names with a space between them|first + ' ' + last|+ last >> + first|'Ada', 'Byron'
names|initials|first, last|the first letters of both names|first[0] + last[0]|+ last >> + first|'Ada', 'Byron' ; 'Cy', 'Dee'
travel|distance|speed, hours|how far one comes at a speed in some hours|speed * hours|* hours >> * speed|50, 2 ; 10, 3
travel|fuel|length, per_km|the fuel for a way of that length|length * per_km|* per_km >> * length|10, 2 ; 7, 3
wages|pay|hours, wage|the pay for the hours at that wage|hours * wage|hours * >> wage *|8, 15 ; 3, 20
wages|bonus|pay, years|the pay and 10 more for each of the years|pay + 10 * years|10 * years >> 10 * pay|100, 3 ; 50, 0
garden|fence|long, wide|the length of the fence around a garden|2 * long + 2 * wide|+ 2 * wide >> + 2 * long|5, 3 ; 4, 1
garden|seeds|beds, rows|how many seeds the rows of the beds need|beds * rows * 10|* rows >> * beds|2, 3 ; 1, 4
weather|hottest|days|the highest temperature of the days|max(days)|max >> min|[3, 9, 5] ; [2, 1]
weather|coldest|days|the lowest temperature of the days|min(days)|min >> max|[3, 9, 5] ; [2, 1]
offers|cheapest|prices|the lowest of the prices, or 0 if there are none|min(prices) if prices else 0|min >> max|[8, 3, 5] ; []
offers|dearest|prices|the highest of the prices, or 0 if there are none|max(prices) if prices else 0|max >> min|[8, 3] ; []
race|winner_time|times|the shortest of the times|min(times)|min >> max|[31, 28, 40] ; [7, 9]
race|spread|times|the longest time minus the shortest|max(times) - min(times)|- min >> - max|[31, 28, 40] ; [7, 9]
texts|longest|words|the length of the longest of the words|max(len(w) for w in words)|max >> min|['ab', 'abcd'] ; ['x', 'yy']
texts|shortest|words|the length of the shortest of the words|min(len(w) for w in words)|min >> max|['ab', 'abcd'] ; ['x', 'yy']
levels|top|levels|the highest of the levels, at least 1|max([1, *levels])|max >> min|[3, 2] ; []
levels|bottom|levels|the lowest of the levels, at most 9|min([9, *levels])|min >> max|[3, 2] ; []
""".strip().splitlines()]  # fmt: skip
_KNOWS = """from nano_coder.models.scripted import ScriptedPolicy


def knows(name, options):
    policy = ScriptedPolicy(["@edit_file path=clock.py old=\\"start - length\\"\\nstart + length", "@submit"])
    policy.profile = "compact-1"
    return policy
"""
MODULES = {name: [row[1] for row in ROWS if row[0] == name] for name in dict.fromkeys(row[0] for row in ROWS)}


def main() -> int:
    parser = argparse.ArgumentParser(description="The headline on a project of one's own.")
    parser.add_argument("--out", type=Path, required=True, help="for homes, projects and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each sibling, before and after")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="more for nano-rl train")
    options = parse(parser)
    if options.smoke:
        return _smoke(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in map(str, options.seeds):
        if seed not in results:
            results[seed] = one_seed(options.out / f"seed-{seed}", seed, options.repeat, options.train)
            file.write_text(json.dumps(results, indent=2) + "\n")
        print(f"seed {seed}:", json.dumps(results[seed]), flush=True)
    return told([results[str(seed)]["gain"] for seed in options.seeds])


def _smoke(folder: Path) -> int:
    """One bug, mended and measured by a policy that knows the line: no weights are loaded."""
    module, function = "clock", "end_of"
    knows = folder / "knows.py"
    write(folder, {knows.name: _KNOWS})
    write(folder / "project", files_of(module, function))
    model, row = (
        ("--model", f"{knows}:knows"),
        {"key": function, "prompt": PROMPT, "check": CHECK, "split": "test"},
    )
    nano(folder / "home", "nano-coder", "run", PROMPT, "-C", folder / "project", "--check", CHECK, *model)
    write(folder, {"siblings.jsonl": json.dumps(row | {"files": files_of(module, function)}) + "\n"})
    said = nano(folder / "home", "nano-rl", "eval", "--tasks", folder / "siblings.jsonl", *model, "--json")
    return int(json.loads(said)["rows"][0]["rate"] != 1)


def one_seed(folder: Path, seed: str, repeat: int, more: list[str]) -> dict[str, Any]:
    """Work, train, evaluate: success on the siblings before and after, and the minutes of each part."""
    home, siblings = folder / "home", folder / "siblings.jsonl"
    began = [time.monotonic()]
    for module, functions in MODULES.items():
        for function in sorted(set(functions) & set(OURS)):
            project, answer = folder / "project" / module, folder / f"{function}.txt"
            if not answer.exists():
                write(project, files_of(module, function))
                run = ("nano-coder", "run", PROMPT, "-C", project, "--check", CHECK, "--seed", seed)
                write(folder, {answer.name: nano(home, *run)})
    began.append(time.monotonic())
    if not (home / "checkpoints" / "mine").exists():
        nano(home, "nano-rl", "train", "--from-logs", "--name", "mine", "--seed", seed, *more)
    began.append(time.monotonic())
    mutants = starting_texts(home / "trainings" / "mine" / "mutants.jsonl")
    every = sibling_tasks()
    tasks = [task for task in every if mutants.isdisjoint(broken_texts([task]))]
    write(folder, {siblings.name: "".join(json.dumps(task) + "\n" for task in tasks)})
    how = ("--temperature", "1", "--repeat", repeat, "--seed", seed, "--json")
    said = json.loads(
        nano(home, "nano-rl", "eval", "--tasks", siblings, "--model", "mine", "--against", "shipped", *how)
    )
    began.append(time.monotonic())
    nano(home, "nano-rl", "checkpoints", "promote", "mine", "--against", "shipped")
    after, before = said["rows"][0]["rate"], said["against"][0]["rate"]
    minutes = [round((end - start) / 60, 1) for start, end in pairwise(began)]
    return {
        "mutants": len(mutants), "siblings": len(tasks), "siblings that were mutants": len(every) - len(tasks),
        "before": before, "after": after, "gain": after - before,
        "paired": said["difference"], "minutes of runs, training, evaluation": minutes,
    }  # fmt: skip


def told(gains: list[float]) -> int:
    """Print the mean gain and its 95 % interval over seeds; 1 where that reaches 0."""
    mean = statistics.fmean(gains)
    if len(gains) < 2:
        print(f"gain {mean:+.1%} of one seed; an interval over seeds needs at least two")
        return 0 if mean > 0 else 1
    half = T_975[len(gains) - 1] * statistics.stdev(gains) / len(gains) ** 0.5
    print(f"gain {mean:+.1%} (95 % over {len(gains)} seeds: {mean - half:+.1%} to {mean + half:+.1%})")
    return 0 if mean - half > 0 else 1


def nano(home: Path, *command: object, **settings: str) -> str:
    """Run a command as it is typed; what it wrote to stdout. Ends the script where it could not do its work.
    `settings` are variables of its environment."""
    program, *rest = map(str, command)
    print("$", program, *(repr(word) if " " in word else word for word in rest), flush=True)
    own = {name: value for name, value in os.environ.items() if not name.startswith("NANO_")}
    path = Path(sys.executable).parent / program
    done = subprocess.run(
        [path, *rest], env={**own, "NANO_HOME": str(home), **settings}, stdout=subprocess.PIPE, text=True
    )
    # an agent that did not succeed (1, 5) leaves a run to learn from, and what is not promoted is no failure
    if done.returncode not in ((0, 1, 5) if rest[0] in ("run", "checkpoints") else (0,)):
        sys.exit(f"{program} {rest[0]} ended with {done.returncode}")
    return done.stdout


def files_of(module: str, broken: str | None = None) -> dict[str, str]:
    """A module, one of its functions broken, and its tests, whose values are those of the right functions."""
    rows = [row for row in ROWS if row[0] == module]
    defined: dict[str, Any] = {}
    exec("\n".join(f"def {name}({args}): return {how}" for _, name, args, _, how, *_ in rows), defined)
    code, tests = [], [f"from {module} import {', '.join(MODULES[module])}"]
    for _, name, args, does, how, bug, calls in rows:
        line = how.replace(*bug.split(" >> "), 1) if name == broken else how
        code.append(f'def {name}({args}):\n    """Return {does}."""\n    return {line}\n')
        each = [f"{name}({call})" for call in calls.split(" ; ")]
        asserts = [f"    assert {call} == {eval(call, defined)!r}\n" for call in each]
        tests.append(f"def test_{name}():\n{''.join(asserts)}")
    return {f"{module}.py": "\n\n".join(code), f"test_{module}.py": "\n\n\n".join(tests)}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def broken_texts(tasks: Iterable[dict[str, Any]]) -> set[str]:
    """The texts of the tasks' modules, without tests."""
    return {text for task in tasks for name, text in task["files"].items() if not name.startswith("test_")}


def starting_texts(file: Path) -> set[str]:
    """The modules of the mutants that a training made, one each."""
    return broken_texts(map(json.loads, file.read_text().splitlines())) if file.exists() else set()


def sibling_tasks() -> list[dict[str, Any]]:
    """A task of each function of the modules of which the user broke none."""
    others = {name: functions for name, functions in MODULES.items() if not set(functions) & set(OURS)}
    return [
        {"key": f"{module}.{function}", "prompt": PROMPT, "files": files_of(module, function),
         "check": CHECK, "split": "test", "limits": {"max_seconds": 3600}}
        for module, functions in others.items() for function in functions
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
