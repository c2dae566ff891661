"""The tasks' own solutions, run for real: logged ones are taken, and one that fails says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from domains import runtime

from nano_coder.run.execution import Runtime
from nano_rl.imitation import oracle_runs
from nano_shared.errors import UsageError
from nano_shared.types import Limits, OracleAction, Split, Task
from nano_suites.drawing import make_tasks


@pytest.fixture
def within(tmp_path: Path) -> Runtime:
    return runtime(tmp_path)


@pytest.fixture
def tasks() -> list[Task]:
    return make_tasks(suite="functions", levels=[2], n=2, seed=3, split=Split.TRAIN, views=["fix"])


def test_a_run_of_the_log_is_not_run_again(tasks: list[Task], within: Runtime) -> None:
    first = oracle_runs(tasks[:1], within)
    both = oracle_runs(tasks, within)
    assert [run.task.id for run in both] == [task.id for task in tasks]
    assert both[0].id == first[0].id
    assert [run.reward for run in both] == [1, 1]


def test_a_solution_that_solves_nothing_is_named(tasks: list[Task], within: Runtime) -> None:
    idle = tasks[0].model_copy(update={"oracle": (OracleAction(name="submit", arguments={}),)})
    with pytest.raises(UsageError, match=rf"'{re.escape(idle.key)}' does not solve it .*leave it out"):
        oracle_runs([idle], within)


@pytest.mark.parametrize("limits", [Limits(max_tokens=20), Limits(max_turns=1)], ids=["tokens", "turns"])
def test_a_solution_that_was_cut_off_says_by_which_limit(
    limits: Limits, tasks: list[Task], within: Runtime
) -> None:
    short = tasks[0].model_copy(update={"limits": limits})
    limit = "max_tokens, where a byte of text counts" if limits.max_tokens == 20 else "max_turns"
    with pytest.raises(UsageError, match=f"was ended by {limit}.*raise the task's limit"):
        oracle_runs([short], within)


def test_a_task_without_a_solution_is_refused(tasks: list[Task], within: Runtime) -> None:
    with pytest.raises(UsageError, match="has no oracle"):
        oracle_runs([tasks[0].model_copy(update={"oracle": None})], within)
