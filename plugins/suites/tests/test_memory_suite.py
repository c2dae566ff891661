"""Tasks of one project: what the runs of earlier ones remember is all that the last one can know of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from domains import runtime, sample
from pydantic import ValidationError

from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_formats.row_format import find_format
from nano_rl.commands.eval import without_tools
from nano_rl.gather.rollouts import collect, execute, oracle_policy, run_in_project
from nano_rl.imitation import oracle_runs
from nano_shared.types import OracleAction, Split, Task, Trajectory
from nano_suites.drawing import make_tasks
from nano_suites.family import act


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return runtime(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def task() -> Task:
    (found,) = make_tasks(suite="memory", levels=[1], n=1, seed=1, split=Split.TRAIN)
    return found


def attempt(task: Task, within: Runtime, **actions: Sequence[OracleAction]) -> list[Trajectory]:
    """The runs of a task with one earlier one: by the oracles, or by other actions for `first` and `last`."""
    changed = {task.earlier[0].key: actions.get("first"), task.key: actions.get("last")}

    def policy_of(one: Task) -> ScriptedPolicy:
        given = changed[one.key]
        return oracle_policy(
            one if given is None else one.model_copy(update={"oracle": tuple(given)}), within.profile
        )

    return run_in_project(task, within, policy_of=policy_of)


@pytest.mark.parametrize("split", Split)
def test_oracles_earn_one_and_their_earlier_runs_as_well(split: Split, within: Runtime) -> None:
    tasks = sample("memory", 1, split)
    runs = execute(tasks, [oracle_policy(one, within.profile) for one in tasks], within)
    assert [run.task.key for run in runs] == [one.key for task in tasks for one in (*task.earlier, task)]
    assert {run.reward for run in runs} == {1.0}


def test_what_was_not_remembered_is_not_known(task: Task, within: Runtime) -> None:
    """The earlier task is done, but nothing is noted: the last one fails, and the earlier run with it."""
    assert task.earlier[0].oracle
    unnoted = [action for action in task.earlier[0].oracle if action.name != "remember"]
    asked = [*(task.oracle or ())[:1], act("submit", answer="I do not know")]
    first, last = attempt(task, within, first=unnoted, last=asked)
    assert "no notes" in last.turns[0].observations[0].text
    assert (last.reward, first.reward) == (0.0, 0.0)
    assert first.verdict is not None
    assert (first.verdict.components["tests"], first.verdict.components["later"]) == (1.0, 0.0)
    assert within.store.get(first.id).reward == 0.0


def test_an_earlier_run_that_fails_its_own_task_earns_nothing(task: Task, within: Runtime) -> None:
    assert task.earlier[0].oracle
    *steps, _ = task.earlier[0].oracle
    first, last = attempt(task, within, first=[*steps, act("submit", answer="no such thing")])
    assert (first.reward, last.reward) == (0.0, 1.0)


def test_attempts_see_no_notes_of_each_other(task: Task, within: Runtime) -> None:
    """A second attempt numbers its notes from 1, and what the first one noted is gone."""
    for _ in range(2):
        first, _ = attempt(task, within)
        said = [turn.observations[0].text for turn in first.turns if turn.calls[0].name == "remember"]
        assert said == ["kept as note 1"]
    assert within.store.notes(None, lambda text: (text, ())).all() == []


def test_groups_of_rollouts_hold_a_group_of_each_earlier_task(task: Task, within: Runtime) -> None:
    silent = replace(within, policy=ScriptedPolicy(["@submit\nok"] * 2))
    runs = collect([task], silent, group_size=3)
    assert [run.task.key for run in runs] == [task.earlier[0].key, task.key] * 3


def test_demonstrations_hold_the_earlier_oracles(task: Task, within: Runtime) -> None:
    for _ in range(2):  # the second time from the log
        runs = oracle_runs([task], within)
        assert [run.task.key for run in runs] == [task.earlier[0].key, task.key]


def test_leaving_a_tool_out_leaves_it_out_of_earlier_tasks(task: Task, within: Runtime) -> None:
    left = without_tools(task, ("remember", "recall"), within.profile)
    assert [set(one.tools or ()) & {"remember", "recall"} for one in (left, *left.earlier)] == [set(), set()]


def test_a_task_is_read_back_with_its_earlier_ones_and_others_keep_their_ids(task: Task) -> None:
    again = Task.model_validate(json.loads(task.model_dump_json()))
    assert again == task
    alone = task.model_copy(update={"earlier": ()})
    assert "earlier" not in alone.model_dump()
    assert alone.id != task.id


def test_earlier_tasks_are_one_sequence(task: Task) -> None:
    with pytest.raises(ValidationError, match="earlier"):
        Task(key="k", prompt="p", earlier=(task,))
    with pytest.raises(ValidationError, match="keys of their own"):
        Task(key="k", prompt="p", earlier=(Task(key="k", prompt="q"),))


@pytest.mark.parametrize("format", ["harbor", "nemo-gym"])
def test_formats_of_others_refuse_what_they_cannot_carry(task: Task, format: str) -> None:
    (refusal,) = find_format(format).refusals([task])
    assert "tasks that come before it" in str(refusal)


def test_the_fact_stands_nowhere_in_the_last_task() -> None:
    for one in sample("memory", 10):
        shown = " ".join((one.prompt, *one.files.values()))
        answer = str((one.oracle or ())[-1].arguments["answer"])
        assert answer not in shown
