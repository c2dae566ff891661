"""Tables of success: by suite, level and view, with runs of one task counted as what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import trajectory
from looping import tiny_model
from promoted import NANO

from integration.paired import paired
from nano_coder.agent.profiles import COMPACT_1
from nano_rl.checkpoints.evaluate import row_of, success_interval, suite_of, table, wilson
from nano_rl.commands.eval import tool_names, without_tools
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Finish, Provenance, Split, StopReason, Task, Trajectory
from nano_suites.drawing import make_tasks

pytest_plugins = ["command_lines"]


def run(
    key: str, reward: float | None, source: str = "user", level: int | None = None, program: str | None = None
) -> Trajectory:
    task = Task(
        key=key, prompt="Do it.", provenance=Provenance(source=source), level=level, view="copy",
        program_hash=program,
    )  # fmt: skip
    return trajectory(key=key, reward=reward).model_copy(update={"task": task})


def test_a_row_for_all_one_a_suite_and_one_a_level() -> None:
    runs = [run("a", 1.0, "x", 0), run("b", 0.0, "x", 1), run("c", 1.0, "y", 1), run("d", None, "y", 1)]
    rows = {row.name: (row.successes, row.graded, row.ungraded) for row in table(runs)}
    assert rows == {
        "all": (2, 3, 1), "suite x": (1, 2, 0), "suite y": (1, 1, 1), "level 0 copy": (1, 1, 0),
        "level 1 copy": (1, 2, 1),
    }  # fmt: skip
    assert [row.name for row in table(runs[:2])] == ["all", "level 0 copy", "level 1 copy"]


def test_a_made_task_belongs_to_the_suite_that_made_it() -> None:
    (task,) = make_tasks(levels=[0], n=1, seed=1, split=Split.TEST)
    assert suite_of(task).startswith("functions-")
    (other,) = make_tasks(suite="shell", levels=[0], n=1, seed=1, split=Split.TEST)
    assert suite_of(other).startswith("shell-")


def test_runs_of_one_task_are_not_independent_tries() -> None:
    once = row_of("once", [run(key, reward) for key, reward in zip("abcd", (1, 0, 1, 1), strict=True)])
    assert (once.low, once.high) == wilson(3, 4)
    often = row_of("often", [run(key, key != "b") for key in "abcd" for _ in range(25)])
    assert (often.low, often.high) == wilson(3, 4)  # four tasks, however often each is run
    mixed = row_of("mixed", [run(key, (key < "c") ^ (i == 0)) for key in "abcd" for i in range(25)])
    assert mixed.high - mixed.low > 0.5 * (once.high - once.low)


def test_tasks_of_one_program_are_not_independent_tries() -> None:
    """Forty tasks ask for one program, and five for programs of their own."""
    common = [run(f"common-{i}", 1.0, program="p") for i in range(40)]
    rare = [run(f"rare-{i}", float(i < 2)) for i in range(5)]
    row = row_of("all", common + rare)
    assert row.rate == 42 / 45
    assert row.low < 0.5  # where the common program is not drawn
    old = [run(f"common-{i}", 0.0, program="p") for i in range(40)] + rare
    gained, low, _high = paired(common + rare, old)
    assert gained == 40 / 45
    assert low == 0  # one program was learned: that may be luck


def test_of_one_task_the_runs_tell_what_there_is_to_tell() -> None:
    row = row_of("one", [run("a", reward) for reward in (1, 1, 0, 1, 0, 1)])
    assert (row.low, row.high) == wilson(4, 6)


def test_an_interval_where_all_agree() -> None:
    assert success_interval([[1.0], [1.0]]) == wilson(2, 2)
    assert success_interval([[1.0, 1.0], [1.0]]) == wilson(2, 2)
    assert success_interval([]) == (0, 1)


def test_a_task_counts_once_in_a_comparison() -> None:
    old = [run("a", 0.0), run("b", 0.0)]
    new = [*(run("a", 1.0) for _ in range(9)), run("b", 0.0)]
    assert paired(new, old)[0] == 0.5


def test_tools_are_left_out_of_what_a_task_or_its_profile_offers() -> None:
    assert tool_names("plan, memory") == ("plan", "remember", "recall")
    own = Task(key="a", prompt="Do it.", tools=("plan", "shell", "submit"))
    assert without_tools(own, ("plan",), COMPACT_1).tools == ("shell", "submit")
    open_task = Task(key="b", prompt="Do it.")
    left = without_tools(open_task, ("shell", "recall"), COMPACT_1).tools
    assert left == tuple(tool.name for tool in COMPACT_1.tools if tool.name != "shell")
    for wrong, why in (("submit", "ends every run"), ("plans", "is no tool")):
        with pytest.raises(UsageError, match=why):
            tool_names(wrong)


def test_an_answer_that_goes_round_is_ended_as_in_a_users_run_unless_it_trains(
    home: Path, nano: NANO, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    tasks = make_tasks(levels=[0], n=1, seed=1, split=Split.TEST, views=["copy"])
    folder = tiny_model(home.parent / "round", max_positions=2000, tasks=tasks)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # all tokens are equally likely, of which greedy sampling takes the first
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(folder)
    monkeypatch.setenv("NANO_PROFILE", "compact-1")
    (file := home.parent / "tasks.jsonl").write_text(tasks[0].model_dump_json() + "\n")
    how = ("--tasks", file, "--model", folder, "--limit", "max_completion_tokens=200", "--temperature", "0")
    for command in ("eval", "rollout"):
        code, _, err = nano(command, *how, "--log", home.parent / f"{command}.db", "--json")
        assert code == 0, err
    with LogStore.open(home.parent / "eval.db") as store:
        run = store.get(store.ids()[0][0])
        finishes = {turn.completion.finish for turn in run.turns}
        assert (run.stop, finishes) == (StopReason.REPETITION, {Finish.REPETITION})
    with LogStore.open(home.parent / "rollout.db") as store:
        run = store.get(store.ids()[0][0])
        assert {turn.completion.finish for turn in run.turns} == {Finish.LENGTH}
