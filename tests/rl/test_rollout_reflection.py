"""Reflection in rollouts: second attempts are graded, logged and grouped, and their worth is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import Loop, parity, same, tiny_model
from pydantic import ValidationError

from nano_apis.agent import ForeignAgent
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import PROFILES
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunSettings, Runtime, is_reflection
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.cli import cli
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import collect
from nano_rl.learn.groups import form_groups, to_samples
from nano_rl.logs.admission import TargetPolicy, check_runs
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import CommandChecks
from nano_shared.store import LogStore
from nano_shared.types import Task, ToolCall, Trajectory

PROFILE = PROFILES["compact-1"]


def act(tool: str, **arguments: str) -> str:
    return DIALECTS[PROFILE.dialect].render("", (ToolCall(name=tool, arguments=arguments),), PROFILE.tools)


SUBMIT = act("submit")
WRONG = act("write_file", path="a.py", content="two\n")
RIGHT = act("write_file", path="a.py", content="three\n")


def a_task(key: str = "t") -> Task:
    hidden = CommandChecks(command="grep -q three a.py")
    return Task(key=key, prompt="Write three.", files={"a.py": "one\n"}, hidden=hidden)


def a_runtime(folder: Path, *texts: str) -> Runtime:
    policy = ScriptedPolicy(list(texts), tokens=True, context_limit=1_000_000)
    return Runtime(policy=policy, sandbox=open_sandbox(), store=LogStore.open(folder / "log.db"))


def test_a_failed_run_is_followed_by_second_attempts_that_form_a_group(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, WRONG, SUBMIT, RIGHT, SUBMIT, WRONG, SUBMIT)
    runs = collect([a_task()], runtime, reflect=2, seed=3)
    assert [run.reward for run in runs] == [0.0, 1.0, 0.0]
    first, second = runs[:1], runs[1:]
    assert [run.parent for run in second] == [first[0].id] * 2
    assert len({run.seed for run in runs}) == 3
    groups = form_groups(runs)
    assert [group.rewards_G for group in groups] == [(0.0,), (1.0, 0.0)]
    # the attempts are what is trained: the tokens of the run before them are context
    (sample,) = to_samples(runs[1], 1.0)
    assert sum(sample.mask) == sum(len(text.encode()) + 1 for text in (RIGHT, SUBMIT))
    assert [runtime.store.get(run.id) for run in runs] == runs


def test_the_log_trains_reflection(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, WRONG, SUBMIT, RIGHT, SUBMIT, WRONG, SUBMIT)
    runs = collect([a_task()], runtime, reflect=2)
    target = TargetPolicy(profile=PROFILE, template_hash=runs[0].template_hash)
    (checked,) = check_runs(runtime.store.facts(), target)
    assert [code for _, code in checked] == [None] * 3
    _, group = form_groups(runtime.store.get(run.id) for run, _ in checked)
    assert group.forked
    assert {run.id for run in group.trajectories} == {run.id for run in runs[1:]}


def test_what_passes_at_first_needs_no_second_attempt(tmp_path: Path) -> None:
    runs = collect([a_task()], a_runtime(tmp_path, RIGHT, SUBMIT), reflect=3)
    assert [run.reward for run in runs] == [1.0]


def test_an_agent_of_others_makes_no_second_attempts(tmp_path: Path) -> None:
    agent = ForeignAgent(command="python agent.py")
    with pytest.raises(UsageError, match="an agent of others begins anew"):
        collect(
            [a_task()],
            replace(a_runtime(tmp_path, WRONG, SUBMIT), settings=RunSettings(agent=agent)),
            reflect=2,
        )


def test_an_oracle_is_not_reflected_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rollout", "--tasks", str(tmp_path / "none.jsonl"), "--oracle", "--reflect"]
    with pytest.raises(SystemExit) as end:
        run_command(cli, command)
    assert end.value.code == 2
    assert "oracles do not fail" in capsys.readouterr().err


def parity_of_second(run: Trajectory) -> float:
    """Of a first attempt 0, of a second one 0 or 1 by its tokens."""
    return parity(run) if is_reflection(run) else 0.0


@pytest.mark.slow
def test_a_training_learns_from_second_attempts_alone_where_every_first_one_fails(tmp_path: Path) -> None:
    tiny = tiny_model(tmp_path / "tiny", max_positions=1024)
    rows: list[dict[str, float]] = []

    def go(folder: str, reflect: int) -> dict[str, torch.Tensor]:
        rows.clear()
        loop = Loop(tiny, tmp_path / folder)
        return loop.go(score=parity_of_second, reflect=reflect, on_step=lambda _, __, row: rows.append(row))

    without = go("without", 0)
    assert all(row["frac_zero_std"] == 1 for row in rows)
    weights = go("with", 3)
    for row in rows:
        assert row["rollouts"] == 2 * 2 * (1 + 3)  # prompts, group_size, the first and three more
        assert row["groups"] == 2 + 4
        assert (row["graded/all"], row["graded/second"]) == (4, 12)
        assert row["success/all"] == 0
    assert not same(weights, without)
    assert same(weights, go("again", 3))
    refilled: list[dict[str, float]] = []
    Loop(tiny, tmp_path / "refill").go(
        score=parity_of_second, reflect=2, refill=1, steps=1, on_step=lambda _, __, v: refilled.append(v)
    )
    assert (refilled[0]["refill_groups"], refilled[0]["graded/all"]) == (2, 8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reflect": 1}, "use at least 2"),
        ({"reflect": 2, "group_size": 0}, "group_size = 0 rolls out none"),
        ({"reflect": 2, "engine": "http://a:1/v1", "ray": "auto"}, "leave out"),
    ],
)
def test_second_attempts_that_cannot_be_trained_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate({"steps": 1, **settings})
