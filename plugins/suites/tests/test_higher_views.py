"""Levels 4 to 7: what each view promises beyond what admission checks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache

import pytest
from oracles import follow

from nano_rl.tasks.suite import split_of
from nano_shared.hidden_checks import CaseChecks, MutantChecks
from nano_shared.types import Split, Task
from nano_suites.functions.admitted_program import belongs
from nano_suites.functions.program import Param, Program, ValueKind, compile_function, outcome
from nano_suites.functions.refactor_views import verbose_body
from nano_suites.functions.views import SUITE, VIEWS

HIGHER = [view for view in VIEWS if view.level >= 4]
SEEDS = range(4)


@cache
def sample(name: str, level: int) -> list[Task]:
    (view,) = (view for view in HIGHER if (view.name, view.level) == (name, level))
    return [SUITE.make(view, Split.TRAIN, seed) for seed in SEEDS]


@pytest.fixture(
    params=[(v.name, v.level, i) for v in HIGHER for i in SEEDS], ids=lambda p: "-".join(map(str, p))
)
def task(request: pytest.FixtureRequest) -> Task:
    name, level, number = request.param
    return sample(name, level)[number]


def test_every_level_has_its_views() -> None:
    assert sorted((view.name, view.level) for view in HIGHER) == sorted(
        [
            ("write_body", 4), ("write_test", 5), ("repair", 5), ("repair", 6), ("extend", 6),
            ("refactor", 6),
            ("edit_among_files", 7), ("repair", 7),
        ]
    )  # fmt: skip


def test_tasks_belong_to_their_split_and_offer_what_the_oracle_needs(task: Task) -> None:
    assert task.family is not None
    assert split_of(task.family) is Split.TRAIN
    assert task.oracle is not None
    assert {call.name for call in task.oracle} <= set(task.tools or ())
    assert len(task.oracle) <= task.limits.max_turns
    assert f"python test_{task.artifacts[0].removeprefix('test_')}" == task.check


def test_every_function_of_a_workspace_belongs_to_the_split(task: Task) -> None:
    """The function on top, which only lists the others, aside."""
    top = task.hidden.entry_point if isinstance(task.hidden, CaseChecks) else None
    for name, text in follow(task)[0].items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and not (node.name == top and _lists_calls(node)):
                assert split_of(_skeleton(node)) is Split.TRAIN, (name, node.name)


def _lists_calls(node: ast.FunctionDef) -> bool:
    last = node.body[-1]
    return (
        isinstance(last, ast.Return)
        and isinstance(last.value, ast.List)
        and all(isinstance(e, ast.Call) for e in last.value.elts)
    )


def _skeleton(node: ast.FunctionDef) -> str:
    from nano_suites.functions.program import skeleton

    node.args.defaults = []  # an extension's default is no part of its program
    return skeleton(ast.unparse(node))


def test_written_bodies_hold_a_loop_or_a_branch() -> None:
    for task in sample("write_body", 4):
        body = next(a for a in task.oracle or () if a.name == "edit_file").arguments["new"]
        lines = str(body).split("\n")
        assert 2 <= len(lines) <= 6
        assert any(line.lstrip().startswith(("for ", "while ", "if ")) for line in lines)


def test_a_traced_repair_shows_where_its_script_stops() -> None:
    for task in (*sample("repair", 5), *sample("repair", 7)):
        assert "Traceback (most recent call last):" in task.prompt
        test = next(text for name, text in task.files.items() if name.startswith("test_"))
        shown = next(line.strip() for line in task.prompt.split("\n") if line.startswith("    assert"))
        assert shown in test.split("\n")


def test_a_file_among_several_is_not_named() -> None:
    for task in sample("edit_among_files", 7):
        edited = next(str(a.arguments["path"]) for a in task.oracle or () if a.name == "edit_file")
        assert edited not in task.prompt
        assert len(task.artifacts) >= 4


def test_an_extended_function_keeps_its_old_calls_and_takes_new_ones() -> None:
    for task in sample("extend", 6):
        assert isinstance(task.hidden, CaseChecks)
        old = [c for c in task.hidden.cases if not c.kwargs]
        new = [c for c in task.hidden.cases if c.kwargs]
        assert len(old) >= 8
        assert len(new) >= 8
        source = task.files[task.artifacts[0]]
        function = compile_function(source, task.hidden.entry_point)
        assert all(outcome(function, c.args) == ("value", c.expected) for c in old)


def test_a_refactoring_starts_beyond_its_bound() -> None:
    from nano_suites.checks.source_measure import measured

    for task in sample("refactor", 6):
        assert isinstance(task.hidden, CaseChecks)
        (bound,) = task.hidden.metrics
        name = task.artifacts[0]
        before, after = measured({name: task.files[name]}), measured({name: follow(task)[0][name]})
        assert before is not None
        assert after is not None
        assert after[bound.name] <= bound.at_most < before[bound.name]


def test_given_mistakes_are_those_that_are_graded() -> None:
    for task in sample("write_test", 5):
        assert isinstance(task.hidden, MutantChecks)
        for source in task.hidden.mutants.values():
            (changed,) = set(source.split("\n")) - set(task.hidden.reference.split("\n"))
            assert changed.strip() in task.prompt


@pytest.mark.parametrize(
    "line",
    ["return [x * 2 for x in xs if x > 3]", "return sum(x for x in xs)", "return len(xs) > 2 and 4 in xs",
     "return 1 if xs else 2", "return len(xs) + max(xs, default=0)", "return len(xs) == 3 or not xs"],
)  # fmt: skip
def test_a_clumsy_version_returns_the_same(line: str) -> None:
    concise = Program(
        name="f",
        params=(Param(name="xs", kind=ValueKind.INTS),),
        returns=ValueKind.INTS,
        doc="d",
        body=(line,),
        family="f",
    )
    body = verbose_body(concise)
    assert body is not None
    assert len(body) > 1
    worse = compile_function(concise.signature + "\n" + "\n".join("    " + x for x in body) + "\n", "f")
    right = compile_function(concise.source(), "f")
    for xs in ([], [1], [4, 5], [3, 4, 9], [7, 7, 7, 7]):
        assert outcome(worse, [xs]) == outcome(right, [xs])


def test_the_guard_asks_family_and_code() -> None:
    source = "def f(a):\n    return a + 1\n"
    home = next(split for split in Split if any(belongs(f"x{n}", source, split) for n in range(40)))
    other = next(split for split in Split if split is not home)
    assert not any(belongs(f"x{n}", source, other) for n in range(40))


_MAKE = """
import hashlib
from nano_rl.tasks.make import make_tasks
from nano_shared.types import Split
tasks = make_tasks(levels=range(8), n=24, seed=7, split=Split.TEST)
print(hashlib.sha256("".join(t.model_dump_json() for t in tasks).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_tasks_are_made_whatever_the_hash_seed() -> None:
    made = {
        subprocess.run(
            [sys.executable, "-c", _MAKE], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(made) == 1
