"""The adapter of coder-1.5b for the profile repair-1: imitation of bugs planted in packages of the registry.

    python integration/coder_policy.py --work DIR [--rows 1200] [--rank 16]

Downloads the source distributions, plants bugs of one line (the mutants of `nano_rl.tasks.mutate`, and parts
of an expression left out), and keeps for each that fails the tests what repair-1 would show of its function,
with the original line as the answer. Then `nano-rl sft` imitates them. None of the packages is one of
`benchmarks/repair.py`, and no function whose code is in one of those is used. A package is gone through once.
`--smoke`: two bugs of a made package, and no training.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from smoke import TOY, parse, toy_package

from nano_coder.agent.profiles import REPAIR_1, first_messages
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.repair import find_places
from nano_coder.tools.tool import ToolContext
from nano_mining.releases import source_folder
from nano_rl.tasks.mutate import Mutant, Splice, mutant_of, splices_by_function
from nano_shared.errors import GivenUp
from nano_shared.types import Limits, Task

PACKAGES = {
    "schema==0.7.8": "",
    "voluptuous==0.16.0": "",
    "uritemplate==4.2.0": "",
    "webcolors==25.10.0": "",
    "xmltodict==1.0.4": "",
    "semver==3.1.1": "",
    "jsonpointer==3.12": "tests.py",
    "netaddr==1.3.0": "",
    "rfc3986==2.0.0": "",
    "pydash==8.1.0": "--ignore=tests/pytest_mypy_testing",
    "itsdangerous==2.2.0": "--ignore=tests/test_itsdangerous/test_timed.py",
    "wtforms==3.3.2": "--ignore=tests/validators/test_email.py",
    "pyrsistent==0.20.0": "",
    "pyasn1==0.6.5": "",
    "hpack==4.2.0": "--ignore=tests/test_hpack_integration.py",
    "cachetools==8.0.1": "",
    "mistune==3.1.3": "",
    "addict==2.4.0": "",
    "ordered-set==4.1.0": "",
    "pluggy==1.7.0": "",
    "asteval==1.0.10": "",
    "pycparser==3.12": "",
}
"""requirement -> options of its tests, which all pass with them"""
PROMPTS = (
    "The tests fail. Find the bug and correct it.",
    "The tests fail. Fix it.",
    "`python -m pytest -q` fails. Find the bug and fix it.",
    "Something is broken: mend it, so that the tests pass.",
)
OPTIMIZER = tuple(f"optimizer.{one}" for one in ("learning_rate=3e-4", "schedule=linear", "warmup_steps=3"))
LIMITS = Limits(tool_seconds=60, memory_mb=2048)
A_FUNCTION, LONGEST = 4, 2400
"""bugs of one function at most, and characters of a row"""
_TESTS = ("tests", "test", "testing", "docs", "benchmark", "scripts", "build")


def check_of(options: str) -> str:
    tests = f"python -m pytest -q --maxfail=10 -o addopts= -p no:cacheprovider {options}".strip()
    return f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=src:. timeout -s INT -k 5 15 {tests}"


def omissions(source: str) -> Iterator[list[Splice]]:
    """By function, the changes that leave out a part of an expression, or all of it but a part."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [
                Splice("omission", node.lineno, node.col_offset, int(node.end_col_offset or 0), text)
                for node in ast.walk(function)
                if isinstance(node, ast.expr) and node.lineno == node.end_lineno
                for text in _shorter(node)
            ]
            lines = source.split("\n")
            yield [one for one in found if lines[one.line - 1].isascii()]


def _shorter(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BoolOp(values=[first, *_, last]):
            yield from map(ast.unparse, (first, last))
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner) | ast.IfExp(body=inner):
            yield ast.unparse(inner)
        case ast.BinOp(left=left, right=right):
            yield from map(ast.unparse, (left, right))
        case ast.Call(func=ast.Attribute(value=inner), args=[]):
            yield ast.unparse(inner)
        case ast.Call(args=[ast.expr() as only], keywords=[]):
            yield ast.unparse(only)
        case ast.Call(args=args, keywords=[*_, _]):
            yield ast.unparse(ast.Call(func=node.func, args=args, keywords=node.keywords[:-1]))
        case ast.Call(args=[*args, _, _], keywords=[]):
            yield ast.unparse(ast.Call(func=node.func, args=node.args[:-1], keywords=[]))


def lost_lines(source: str, function: ast.AST, draw: random.Random) -> list[Mutant]:
    """The function without one of its statements; the answer is that line and the next one."""
    lines, bodies = source.split("\n"), [getattr(node, "body", None) for node in ast.walk(function)]
    inside = [
        one
        for body in bodies
        if isinstance(body, list)
        for one, after in pairwise(body)
        if one.lineno == one.end_lineno == after.lineno - 1
        and not isinstance(one, ast.Import | ast.ImportFrom)
    ]
    if not inside or draw.random() < 0.5:
        return []
    number = draw.choice(inside).lineno
    old = "\n".join(lines[number - 1 : number + 1])
    text = "\n".join([*lines[: number - 1], *lines[number:]])
    return [Mutant("lost line", number, old, lines[number], text)]


def codes_of(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    return {ast.dump(n) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def bugs_of(folder: Path, draw: random.Random, known: set[str]) -> list[list[tuple[str, Mutant]]]:
    """The bugs of each function of a package that is not known, in a random order, on different lines."""
    functions = []
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        if {*inner.parts} & {*_TESTS} or inner.name.startswith(("test", "setup", "conftest")):
            continue
        try:
            source = path.read_text()
            groups = [*splices_by_function(source), *omissions(source)]
        except (SyntaxError, ValueError):
            continue
        starts = {
            n.lineno: n
            for n in ast.walk(ast.parse(source))
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        by_function = dict[int, list[Splice]]()
        for splice in (one for group in groups for one in group):
            start = max((line for line in starts if line <= splice.line), default=0)
            if start and ast.dump(starts[start]) not in known:
                by_function.setdefault(start, []).append(splice)
        for start, splices in by_function.items():
            kinds = sorted({one.kind for one in splices})
            draw.shuffle(splices)
            chosen = dict[int, Mutant]()
            for _ in range(3 * A_FUNCTION):
                kind = draw.choice(kinds)
                one = next((s for s in splices if s.kind == kind and s.line not in chosen), None)
                if one is not None and (mutant := mutant_of(source, one)):
                    chosen[one.line] = mutant
            for lost in lost_lines(source, starts[start], draw):
                chosen[lost.line] = lost
            bugs = [(str(inner), mutant) for mutant in chosen.values()]
            draw.shuffle(bugs)
            functions.append(bugs[:A_FUNCTION])
    draw.shuffle(functions)
    return functions


def row_of(
    requirement: str, bug: tuple[str, Mutant], work: Path, prompt: str, sandbox: Any
) -> dict[str, Any] | None:
    """What repair-1 shows of the place of a bug, and the original line; None where the tests do not fail, or
    the place is not among those that it shows."""
    path, mutant = bug
    broken = work / f"broken-{os.getpid()}-{abs(hash((path, mutant.line, mutant.new)))}"
    shutil.copytree(source_folder(requirement, work), broken, symlinks=True)
    (broken / path).write_text(mutant.source)
    check = check_of(PACKAGES[requirement])
    jail = sandbox.open(broken, LIMITS)
    try:
        context = ToolContext(jail=jail, limits=LIMITS, check=check)
        key = f"{requirement} {path} {mutant.line} {mutant.new}"
        places = dict.fromkeys(find_places(context, key, REPAIR_1.places))
    except GivenUp:
        return None
    finally:
        jail.close()
        shutil.rmtree(broken, ignore_errors=True)
    for rank, place in enumerate(places, 1):
        if place.path == path and place.first <= mutant.line <= place.last:
            task = Task(key="bug", prompt=prompt, check=check)
            shown = [
                {"role": m.role.value, "content": m.content}
                for m in first_messages(REPAIR_1, task, (), place)
            ]
            right = "\n".join(f"{mutant.line}|{line.rstrip()}" for line in mutant.old.split("\n"))
            answer = {"role": "assistant", "content": right}
            if sum(len(m["content"]) for m in shown) > LONGEST:
                return None
            likely = place.likely.index(mutant.line) + 1 if mutant.line in place.likely else None
            facts = {"package": requirement, "kind": mutant.kind, "path": path, "line": mutant.line}
            return {"messages": [*shown, answer], **facts, "rank": rank, "likely": likely}
    return None


def attempted(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The row as a later round shows it, with one to three wrong answers as tried: the line as it is, another
    change of it, or a change of another likely line."""
    system, user, answer = row["messages"]
    head, instruction = user["content"].rsplit("Write each wrong line", 1)
    numbered = dict(re.findall(r"^(\d+)\|(.*)$", head.rsplit("\n\nThe likeliest lines", 1)[0], re.MULTILINE))
    likely = re.findall(r"\d+", head.rsplit("tests that run them: ", 1)[1])
    wrong, right = answer["content"].partition("|")[0], answer["content"]
    body = textwrap.dedent("\n".join(numbered.values()))
    first, margin = (
        int(next(iter(numbered))),
        len("\n".join(numbered.values()).split("\n")[0]) - len(body.split("\n")[0]),
    )
    try:
        splices = [one for group in splices_by_function(body) for one in group]
    except SyntaxError:
        splices = []
    changes = {
        f"{one.line + first - 1}|{' ' * margin}{mutant.new}"
        for one in splices
        if str(one.line + first - 1) in {wrong, *likely} and (mutant := mutant_of(body, one))
    }
    near = sorted(change for change in changes if change.partition("|")[0] == wrong)
    far = sorted(changes.difference(near))
    draw.shuffle(near)
    draw.shuffle(far)
    other = draw.choice([number for number in likely if number in numbered] or [wrong])
    found = [*near[:2], *far[:2], f"{wrong}|{numbered[wrong]}", f"{other}|{numbered[other]}"]
    draw.shuffle(found)
    tried = [one for one in dict.fromkeys(found) if one != right][: draw.choice((1, 1, 2, 3))]
    told = "".join(f"{one}\n" for one in ("Tried, and the tests still fail:", *tried))
    shown = f"{head}{told}Write each wrong line{instruction}"
    return {**row, "messages": [system, {**user, "content": shown}, answer]}


def gather(requirement: str, work: Path, count: int, known: set[str], sandbox: Any) -> list[dict[str, Any]]:
    """The rows of a package, found once."""
    kept = work / f"rows-{requirement}.jsonl"
    if kept.is_file():
        return [json.loads(line) for line in kept.read_text().splitlines()]
    draw, rows, dead, tried = random.Random(f"coder {requirement}"), list[dict[str, Any]](), set[int](), 0
    functions = bugs_of(source_folder(requirement, work), draw, known)
    in_turn = [
        (number, bug)
        for turn in zip_longest(*functions)
        for number, bug in enumerate(turn)
        if bug is not None
    ]
    with ThreadPoolExecutor(2) as pool:
        while in_turn and len(rows) < count and tried < 2 * count:
            some, in_turn = in_turn[:12], in_turn[12:]
            some = [one for one in some if one[0] not in dead]
            prompts = [draw.choice(PROMPTS) for _ in some]
            found = pool.map(
                lambda one, prompt: row_of(requirement, one[1], work, prompt, sandbox), some, prompts
            )
            tried += len(some)
            for (number, _), row in zip(some, found, strict=True):
                if row is None:
                    dead.add(number)
                else:
                    rows.append(row)
            print(f"{requirement}: {len(rows)} rows of {tried}", file=sys.stderr, flush=True)
    kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{requirement}: {len(rows)} rows of {tried} bugs in {len(functions)} functions", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--name", default="coder-repair")
    asked = parse(parser)
    asked.work.mkdir(parents=True, exist_ok=True)
    sandbox = open_sandbox(python=sys.executable)
    if asked.smoke:
        toy_package(asked.work)
        PACKAGES[TOY] = ""
        rows = gather(TOY, asked.work, 2, set(), sandbox)
        print(json.dumps(rows, indent=1))
        sys.exit(None if rows else "no bug of the package made a row")
    from benchmarks.repair import PACKAGES as HELD_OUT

    names = {one.partition("==")[0] for one in PACKAGES}
    assert not names & {*HELD_OUT}, "a package is in both"
    known = set[str]()
    for name, (version, *_) in HELD_OUT.items():
        for path in source_folder(f"{name}=={version}", asked.work).rglob("*.py"):
            known |= codes_of(path.read_text(errors="replace"))
    each = -(-asked.rows // len(PACKAGES)) * 2 // 3
    found = [gather(one, asked.work, each, known, sandbox) for one in PACKAGES]
    rows = [row for rows in found for row in rows]
    random.Random(1).shuffle(rows)
    draw = random.Random(2)
    rows = [attempted(row, draw) if draw.random() < 0.4 else row for row in rows[: asked.rows]]
    file = asked.work / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
    print(f"{len(rows)} rows", flush=True)
    settings = (f"lora_rank={asked.rank}", "batch=6", "dtype=bfloat16", "save_every=5", *OPTIMIZER)
    command = [sys.executable, "-m", "nano_rl", "sft", "--messages", str(file), "--model", "coder-1.5b"]
    command += ["--name", asked.name, *(part for one in settings for part in ("--set", one))]
    subprocess.run(command, env={**os.environ, "NANO_PROFILE": "repair-1"}, check=True)


if __name__ == "__main__":
    main()
