"""Mutation testing of hidden cases: the share of small mistakes in a solution that the cases detect.

Each single-change mutant of the functions that the entry point calls runs on the hidden cases, and on further
inputs similar to theirs. One that survives the cases and differs on a further input is a gap in the checks;
one that never differs counts as equivalent. Everything runs in one jail per task.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nano_coder.sandbox.protocol import Sandbox
from nano_rl.tasks.mutate import mutants
from nano_shared.errors import SandboxError
from nano_shared.files import canonical_json
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.process import parse
from nano_shared.types import Limits, Task


def further_calls(cases: Sequence[Case], rng: random.Random, count: int) -> list[dict[str, Any]]:
    """At most `count` new calls ({"args", "kwargs"}), with the types of one of the cases."""
    shapes = [(len(c.args), tuple(sorted(c.kwargs))) for c in cases]
    seen = {canonical_json([c.args, c.kwargs]) for c in cases}
    found: list[dict[str, Any]] = []
    for _ in range(2 * count):
        if len(found) == count:
            break
        like = rng.choice(cases)
        shape = (len(like.args), tuple(sorted(like.kwargs)))
        kin = [c for c, s in zip(cases, shapes, strict=True) if s == shape]
        args = [_between([c.args[i] for c in kin], rng) for i in range(len(like.args))]
        kwargs = {k: _between([c.kwargs[k] for c in kin], rng) for k in sorted(like.kwargs)}
        key = canonical_json([args, kwargs])
        if key not in seen:
            seen.add(key)
            found.append({"args": args, "kwargs": kwargs})
    return found


def _between(values: Sequence[Any], rng: random.Random) -> Any:
    """One of the values, or a value in their range."""
    one = rng.choice(values)
    same = [v for v in values if type(v) is type(one)]
    if rng.random() < 0.25:
        return one
    if type(one) is int:
        return rng.randint(min(same), max(same))
    if type(one) is str:
        return _text(same, rng)
    return _list(same, rng) if type(one) is list else one


def _text(values: Sequence[str], rng: random.Random) -> str:
    """Words of several of the texts, or a prefix or suffix of one."""
    if rng.random() < 0.4:
        one = rng.choice(values)
        start = rng.randint(0, len(one))
        return one[start:] if rng.random() < 0.5 else one[: len(one) - start]
    if any(" " in v for v in values):
        words = [w for v in values for w in v.split(" ")]
        count = rng.randint(1, max(v.count(" ") for v in values) + 1)
        return " ".join(rng.choice(words) for _ in range(count))
    return rng.choice(values)


def _list(values: Sequence[list[Any]], rng: random.Random) -> list[Any]:
    """Elements of several of the lists, with a length that occurs; sorted if all lists are."""
    pool = [x for v in values for x in v]
    if not pool:
        return []
    size = rng.randint(min(map(len, values)), max(map(len, values)))
    made = [rng.choice(pool) for _ in range(size)]
    if all(type(x) is int for x in pool):
        if rng.random() < 0.5:
            made = [rng.randint(min(pool), max(pool)) for _ in range(size)]
        if all(v == sorted(v) for v in values):
            made.sort()
    return made


KILLED = 0.9
"""smallest share of the mutants that the hidden cases must kill"""
FURTHER = 60
"""number of further inputs"""
MOST = 150
"""largest number of mutants of one task; of more, an even selection is run"""
_CHILD = (Path(__file__).parent / "inside" / "mutants.py").read_text(encoding="utf-8")


class NoMutants(ValueError):
    """There is no function to mutate; the message says why."""


@dataclass(frozen=True, slots=True)
class MutantReport:
    killed: int
    survived: tuple[str, ...]
    """changed lines of mutants that pass the hidden cases and differ on a further input"""
    equal: int
    hollow: tuple[str, ...] = ()
    """constant functions that pass every hidden case"""
    stable: bool = False
    """True if the solution gave the expected value on every hidden case, every time"""

    @property
    def rate(self) -> float | None:
        """Share of the non-equivalent mutants that are killed; None without such mutants."""
        different = self.killed + len(self.survived)
        return self.killed / different if different else None

    @property
    def weakness(self) -> str | None:
        """Why the cases are too weak; None if they are not."""
        if self.hollow:
            return f"a hollow solution passes: {self.hollow[0]}"
        if self.rate is None or self.rate >= KILLED:
            return None
        return f"{self.rate:.0%} of the mutants die, {KILLED:.0%} must; alive: {self.survived[0]}"


@dataclass(frozen=True, slots=True)
class SolutionVariant:
    file: str
    source: str
    description: str
    hollow: bool = False


def run_mutants(task: Task, solution: Mapping[str, str], sandbox: Sandbox, *, times: int = 1) -> MutantReport:
    """Run every mutant of the files of a solution (path -> text) on the hidden cases of the task, and the
    solution itself `times` times. Raises NoMutants where there is no function to mutate, SandboxError where
    the jail fails."""
    hidden = task.hidden
    if not isinstance(hidden, CaseChecks) or not task.artifacts:
        raise NoMutants("there are no hidden cases")
    entry = task.artifacts[0]
    changes = _changes(solution, entry, hidden)
    calls = [{"args": c.args, "kwargs": c.kwargs} for c in hidden.cases]
    more = further_calls(hidden.cases, random.Random(f"survey {task.key}"), FURTHER)
    job = {
        "files": dict(solution), "module": entry.removesuffix(".py").replace("/", "."),
        "entry": hidden.entry_point, "hidden": len(calls), "calls": [*calls, *more],
        "mutants": [(c.file, c.source) for c in changes], "times": times,
    }  # fmt: skip
    with closing(sandbox.open(None, Limits())) as jail:
        result = jail.run_python(
            _CHILD, isolated=True, stdin=json.dumps(job).encode(), timeout=120.0, output_bytes=16 << 20
        )
    reports = [json.loads(line) for line in result.stdout.split(b"\n") if line]
    if reports and "broken" in reports[0]:
        raise NoMutants(str(reports[0]["broken"]))
    if len(reports) != len(changes) + 1:
        said = result.stderr.decode(errors="replace")[-200:]
        raise SandboxError(f"mutation testing ended early: {said or result}")
    expected = ["=" + json.dumps(case.expected, sort_keys=True) for case in hidden.cases]
    found = _counted(changes, reports[1:], len(calls))
    return replace(found, stable=reports[0]["reference"] == [expected] * times)


def _counted(
    changes: Sequence[SolutionVariant], reports: Sequence[dict[str, Any]], hidden: int
) -> MutantReport:
    killed, survived, equal, hollow = 0, [], 0, []
    for change, report in zip(changes, reports, strict=True):
        at = report["at"]
        if change.hollow:
            if at is None or at >= hidden:
                hollow.append(change.description)
        elif at is None:
            equal += 1
        elif at < hidden:
            killed += 1
        else:
            survived.append(change.description)
    return MutantReport(killed, tuple(survived), equal, tuple(hollow))


def _changes(solution: Mapping[str, str], entry: str, hidden: CaseChecks) -> list[SolutionVariant]:
    """Mutants of all functions that the entry point calls, and constant versions of the entry point."""
    found = []
    for file, name in reached(solution, entry, hidden.entry_point):
        for mutant in mutants(solution[file], name):
            description = f"{file}:{mutant.line}: {mutant.old.strip()} -> {mutant.new.strip()}"
            found.append(SolutionVariant(file, mutant.source, description))
    if len(found) > MOST:
        found = [found[i * len(found) // MOST] for i in range(MOST)]
    return [*found, *_hollow(solution[entry], entry, hidden)]


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    """Top-level functions of a module by name; empty if the text is no Python."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return {n.name: n for n in parse(source).body if isinstance(n, ast.FunctionDef)}
    return {}


def reached(solution: Mapping[str, str], entry: str, name: str) -> list[tuple[str, str]]:
    """(file, function) of the entry point and of all functions that it may call, found by name."""
    by_file = {file: _functions(text) for file, text in solution.items() if file.endswith(".py")}
    if name not in by_file.get(entry, {}):
        raise NoMutants(f"{entry} has no function {name!r}")
    order, waiting = [], [(entry, name)]
    while waiting:
        here = waiting.pop(0)
        if here in order:
            continue
        order.append(here)
        body = by_file[here[0]][here[1]]
        used = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
        used |= {n.attr for n in ast.walk(body) if isinstance(n, ast.Attribute)}
        for file, functions in by_file.items():
            own = file == here[0]
            waiting += [(file, n) for n in functions if n in used and (own or n not in by_file[here[0]])]
    return order


def _hollow(source: str, entry: str, hidden: CaseChecks) -> list[SolutionVariant]:
    function = _functions(source)[hidden.entry_point]
    if not function.args.args and not function.args.kwonlyargs:
        return []  # a function without arguments may be constant
    lines = source.split("\n")
    values: list[str] = []
    for value in (None, *(case.expected for case in hidden.cases)):
        if repr(value) not in values and len(values) < 4:
            values.append(repr(value))
    before, after = lines[: function.body[0].lineno - 1], lines[function.end_lineno :]
    pad, name = " " * function.body[0].col_offset, hidden.entry_point
    texts = ("\n".join([*before, f"{pad}return {value}", *after]) for value in values)
    pairs = zip(texts, values, strict=True)
    return [
        SolutionVariant(entry, text, f"{name} returns {value[:40]}", hollow=True) for text, value in pairs
    ]
