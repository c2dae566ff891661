"""Through the real runtime: oracles earn 1, doing nothing earns 0, and so does a wrong end."""

from __future__ import annotations

from pathlib import Path

import pytest
from domains import run, runtime, sample

from nano_coder.run.execution import Runtime
from nano_mining.task_check import check_task
from nano_rl.gather.rollouts import execute, oracle_policy
from nano_rl.tasks.task_file import read_tasks
from nano_shared.hidden_checks import StateChecks
from nano_shared.types import Split, StopReason, Task
from nano_suites.drawing import make_tasks
from nano_suites.family import act

DOMAINS = ("shell", "sql", "data", "logic")
CAPABILITIES = ("search", "perceive", "plan")
"""suites that need one; fewer of their tasks are run, since their oracles take up to thirty steps"""
LEVELS = range(4)


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return runtime(tmp_path_factory.mktemp("domains"))


def of_level(suite: str, level: int, n: int, split: Split = Split.TRAIN) -> list[Task]:
    return [task for task in sample(suite, n, split) if task.level == level]


@pytest.mark.some(4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("suite", DOMAINS)
def test_the_oracle_earns_one_and_doing_nothing_earns_nothing(
    suite: str, level: int, within: Runtime
) -> None:
    for task in (*of_level(suite, level, 2), *of_level(suite, level, 1, Split.TEST)):
        solved = run(task, task.oracle or (), within)
        assert (solved.reward, solved.stop) == (1.0, StopReason.FINISHED), (task.key, solved.verdict)
        assert run(task, [act("submit")], within).reward == 0.0, task.key


@pytest.mark.some(2)
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("suite", CAPABILITIES)
def test_the_oracle_of_a_capability_earns_one(suite: str, level: int, within: Runtime) -> None:
    (task,) = of_level(suite, level, 1)
    solved = run(task, task.oracle or (), within)
    assert (solved.reward, solved.stop) == (1.0, StopReason.FINISHED), (task.key, solved.verdict)
    assert run(task, [act("submit")], within).reward == 0.0, task.key


@pytest.mark.slow
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("suite", [*DOMAINS, *CAPABILITIES])
def test_many_oracles_earn_one(suite: str, level: int, split: Split, within: Runtime) -> None:
    for task in of_level(suite, level, 25, split):
        assert run(task, task.oracle or (), within).reward == 1.0, task.key


@pytest.mark.parametrize("suite", DOMAINS)
def test_a_wrong_answer_earns_nothing(suite: str, within: Runtime) -> None:
    tasks = [t for t in sample(suite, 3) if t.hidden and t.hidden.kind == "answer"]
    task = tasks[0]
    assert run(task, [act("submit", answer="no such thing")], within).reward == 0.0


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("suite", "spoil"),
    [
        ("shell", act("shell", command="for f in $(find . -type f); do echo x >> $f; done")),
        ("sql", None),
        ("data", act("python", code="import glob\nfor f in glob.glob('*.*'): open(f, 'a').write('x')")),
        ("plan", act("write_file", path="steps.md", content="- nothing\n")),
    ],
)
def test_a_wrong_end_state_earns_nothing(suite: str, spoil: object, within: Runtime) -> None:
    """The whole solution, and then one deed too many."""
    tasks = [t for t in sample(suite, 4) if t.hidden and t.hidden.kind == "state"]
    task = tasks[0]
    *solution, end = task.oracle or ()
    if suite == "sql":
        database = solution[0].arguments["database"]
        assert isinstance(task.hidden, StateChecks)
        table = str(task.hidden.state[0].query).split()[3]
        spoil = act("sql", database=database, statement=f"DELETE FROM {table}")
    assert run(task, [*solution, spoil, end], within).reward == 0.0  # type: ignore[list-item]


def test_domain_tasks_run_under_the_profile_that_adds_their_tools(within: Runtime) -> None:
    (task,) = of_level("sql", 0, 1)
    assert run(task, task.oracle or (), within).profile == "compact-1+sql"
    (task,) = of_level("shell", 0, 1)
    assert run(task, task.oracle or (), within).profile == "compact-1"


@pytest.mark.parametrize(
    ("suite", "view"),
    [("search", "one_fact"), ("memory", "one_fact"), ("plan", "order"), ("perceive", "bar")],
)
def test_shortest_forms_are_made_by_name_and_their_oracles_earn_one(
    suite: str, view: str, within: Runtime
) -> None:
    assert view not in {task.view for task in sample(suite, 4)}
    for split in Split:
        (task,) = make_tasks(suite=suite, levels=[0], n=1, seed=2, split=split, views=[view])
        runs = execute([task], [oracle_policy(task, within.profile)], within)
        assert {run.reward for run in runs} == {1.0}


def test_the_example_tasks_are_admitted(within: Runtime) -> None:
    tasks = read_tasks(Path(__file__).parents[3] / "examples" / "seeds.jsonl")
    findings = [check_task(task, within) for task in tasks]
    assert [found.reasons for found in findings] == [()] * 4
