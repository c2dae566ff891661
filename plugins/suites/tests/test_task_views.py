"""What every view promises: its oracle earns 1, its start earns 0, and nothing hidden is shown."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from oracles import follow

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import PROFILES, offered_tools
from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_rl.tasks.suite import program_hash, split_of
from nano_shared.hidden_checks import CaseChecks
from nano_shared.types import Split, Task
from nano_suites.functions.admitted_program import numbered
from nano_suites.functions.program import compile_function, outcome
from nano_suites.functions.views import SUITE, VIEWS, View

SIGNATURES = {
    "read_file": {"path"}, "edit_file": {"path", "new", "line", "old"}, "write_file": {"path", "content"},
    "shell": {"command"}, "calculate": {"expression"}, "submit": {"answer"},
}  # fmt: skip
FIRST = [view for view in VIEWS if view.level <= 3]
each_view = pytest.mark.parametrize("view", FIRST, ids=lambda v: f"{v.name}-{v.level}")


@cache
def sample(view: View) -> list[Task]:
    return [SUITE.make(view, Split.TRAIN, seed) for seed in range(25)]


def every_task() -> Iterator[Task]:
    return (task for view in FIRST for task in sample(view))


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


def _reward(task: Task, files: dict[str, str], answer: str | None, sandbox: Sandbox) -> float | None:
    left = {name: text.encode() for name, text in files.items() if name in task.artifacts}
    return grade(task, files=left, answer=answer, sandbox=sandbox).reward


@pytest.mark.some(3)
@each_view
def test_the_oracle_earns_one(view: View, sandbox: Sandbox) -> None:
    for task in sample(view)[:6]:
        assert _reward(task, *follow(task), sandbox) == 1.0, task.key


@pytest.mark.some(3)
@each_view
def test_the_start_earns_nothing(view: View, sandbox: Sandbox) -> None:
    for task in sample(view)[:6]:
        assert _reward(task, dict(task.files), None, sandbox) == 0.0, task.key


@pytest.mark.some(4)
@each_view
def test_tasks_carry_level_view_family_split_and_hash(view: View) -> None:
    for task in sample(view):
        assert (task.level, task.view, task.split) == (view.level, view.name, Split.TRAIN)
        assert task.family is not None
        assert split_of(task.family) is Split.TRAIN
        assert task.program_hash is not None
        assert task.family in task.key


@each_view
def test_the_same_seed_makes_the_same_task(view: View) -> None:
    assert [SUITE.make(view, Split.TRAIN, seed) for seed in range(3)] == sample(view)[:3]


@each_view
def test_oracles_call_the_offered_tools_with_exact_arguments(view: View) -> None:
    for task in sample(view):
        assert task.oracle is not None
        assert task.oracle[-1].name == "submit"
        assert len(task.oracle) <= task.limits.max_turns
        for call in task.oracle:
            assert call.name in (task.tools or ())
            assert set(call.arguments) <= SIGNATURES[call.name]


@each_view
def test_no_hidden_case_is_shown(view: View) -> None:
    for task in sample(view):
        hidden = task.hidden
        shown = "\n".join((task.prompt, *task.files.values()))
        for case in hidden.cases if isinstance(hidden, CaseChecks) else ():
            call = f"{hidden.entry_point}({', '.join(map(repr, case.args))})"
            assert not case.args or call not in shown, task.key


@pytest.mark.some(2)
@each_view
def test_cases_have_eight_or_more_distinct_inputs(view: View) -> None:
    for task in sample(view):
        hidden = task.hidden
        if isinstance(hidden, CaseChecks) and hidden.cases[0].args:
            assert len({json.dumps(c.args) for c in hidden.cases}) == len(hidden.cases) >= 8


@pytest.mark.slow
def test_prompts_of_the_first_levels_are_short() -> None:
    for task in every_task():
        if task.level in (0, 1):
            assert len(task.prompt.split()) < 60, task.prompt


def test_prompts_are_phrased_in_several_ways() -> None:
    for view, tasks in ((view, sample(view)) for view in FIRST):
        assert view.extra or len({task.prompt.split()[0] for task in tasks}) >= 2, view.name


def test_a_module_to_repair_fails_its_tests_and_passes_when_repaired(tmp_path: Path) -> None:
    tasks = [t for t in every_task() if t.view == "repair"][::120]
    for number, task in enumerate(tasks):
        assert _pytest(tmp_path / f"{number}-before", dict(task.files)) == 1
        assert _pytest(tmp_path / f"{number}-after", follow(task)[0]) == 0


def _pytest(folder: Path, files: dict[str, str]) -> int:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "."]
    return subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode


def test_an_oracle_of_repair_runs_the_tests_first_for_they_name_the_function() -> None:
    for task in every_task():
        if task.view == "repair":
            assert task.oracle is not None
            assert task.oracle[0].arguments == {"command": task.check}


def test_a_corrected_line_is_quoted_as_read_file_shows_it_before_it_is_replaced() -> None:
    for task in (t for t in every_task() if t.view in ("fix", "repair")):
        edit = next(a for a in task.oracle or () if a.name == "edit_file")
        listing = numbered(task.files[str(edit.arguments["path"])]).split("\n")
        quoted = edit.thought.split("\n")[-1]
        assert quoted == listing[int(str(edit.arguments["line"])) - 1]
        assert quoted != f"{edit.arguments['line']}|{edit.arguments['new']}"
        if task.view == "repair":
            assert edit.thought.split("\n")[1] in listing


AGAIN = [view for view in FIRST if view.name in ("fix_again", "repair_again")]


@pytest.mark.parametrize("view", AGAIN, ids=lambda v: v.name)
def test_an_oracle_that_tries_again_first_copies_lines_of_the_same_function(view: View) -> None:
    copied_elsewhere: set[bool] = set()
    for task in sample(view):
        *in_vain, edit = (a for a in task.oracle or () if a.name == "edit_file")
        listing = numbered(task.files[str(edit.arguments["path"])]).split("\n")
        line = int(str(edit.arguments["line"]))
        for vain in in_vain:
            at = int(str(vain.arguments["line"]))
            assert vain.thought.split("\n")[-1] == listing[at - 1] == f"{at}|{vain.arguments['new']}"
            between = listing[min(at, line) - 1 : max(at, line)]
            assert not any("|def " in row or '"""' in row for row in between)
            copied_elsewhere.add(at != line)
    assert copied_elsewhere == {True, False}


@pytest.mark.some(1)
@pytest.mark.parametrize("view", AGAIN, ids=lambda v: v.name)
def test_it_edits_in_vain_up_to_three_times_and_may_say_the_same_again(view: View) -> None:
    tasks = [SUITE.make(view, Split.TRAIN, seed) for seed in range(60)]
    drawn = [[str(a) for a in task.oracle or () if a.name == "edit_file"][:-1] for task in tasks]
    assert {len(texts) for texts in drawn} == {1, 2, 3}
    assert {len(set(texts)) for texts in drawn if len(texts) == 2} == {1, 2}


@pytest.mark.some(1)
@pytest.mark.parametrize("view", AGAIN, ids=lambda v: v.name)
def test_what_it_says_in_vain_leaves_room_for_the_rest(view: View) -> None:
    """Of text, each byte counts as a token."""
    for seed in range(100):
        task = SUITE.make(view, Split.TRAIN, seed)
        for profile in (one for one in PROFILES.values() if not one.places):
            render, tools = DIALECTS[profile.dialect].render, offered_tools(profile, task)
            said = [render(action.thought, (action,), tools) for action in task.oracle or ()]
            assert len("".join(said[:-1]).encode()) < task.limits.max_tokens


@pytest.mark.parametrize("seeds", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_every_function_of_a_module_belongs_to_the_split(seeds: int) -> None:
    hashes = {split: _function_hashes(split, seeds) for split in Split}
    assert not hashes[Split.TRAIN] & hashes[Split.TEST]


def _function_hashes(split: Split, seeds: int) -> set[str]:
    """Of every whole function in repaired modules, neighbours of the buggy one included."""
    found = set()
    for view in (v for v in FIRST if v.name == "repair"):
        for seed in range(seeds):
            task = SUITE.make(view, split, seed)
            module = follow(task)[0][task.artifacts[0]]
            found |= {program_hash(ast.unparse(node)) for node in ast.parse(module).body}
    return found


def test_the_empty_text_is_never_asked_for() -> None:
    """Submitting nothing would be right."""
    view = next(v for v in FIRST if v.name == "predict")
    hidden = [SUITE.make(view, Split.TRAIN, seed).hidden for seed in range(64)]
    assert "''" not in [checks.answer for checks in hidden if checks is not None]


BROKEN = [view for view in FIRST if view.name in ("fix", "repair")]


@pytest.mark.parametrize("seeds", [12, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", BROKEN, ids=lambda v: f"{v.name}-{v.level}")
def test_what_is_to_be_repaired_ends_on_every_hidden_case(view: View, seeds: int) -> None:
    for seed in range(seeds):
        task = SUITE.make(view, Split.TRAIN, seed)
        assert isinstance(task.hidden, CaseChecks)
        function = compile_function(task.files[task.artifacts[0]], task.hidden.entry_point)
        found = [outcome(function, case.args) for case in task.hidden.cases]
        assert ("raise", "OutOfSteps") not in found, task.key
