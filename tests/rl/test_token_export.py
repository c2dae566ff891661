"""`nano-rl export`: rows whose advantages are those of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nano_coder.agent.profiles import COMPACT_1
from nano_rl.cli import cli
from nano_rl.learn.advantages import group_advantages
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Observation,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)


def a_run(name: str, key: str, reward: float | None, *, tokens: bool = True) -> Trajectory:
    def turn(index: int) -> Turn:
        row = TurnTokens(
            context_ids=(1, 2, 10 + index),
            sampled_ids=(7, 8 + int(name[1])),
            logprobs=(-0.5 * (index + 1), -0.25),
        )
        text = f'@submit answer="{name} {index}"'
        return Turn(
            index=index,
            completion=Completion(
                text=text,
                finish=Finish.STOP,
                tokens=row if tokens else None,
                sampling=Sampling(),
                policy_id="w",
            ),
            calls=(ToolCall(name="submit", arguments={"answer": f"{name} {index}"}),),
            parser="compact",
            observations=(Observation(tool="submit", ok=True, text="done", started=0, ended=0),),
            started=1.0,
            ended=2.0,
        )

    verdict = Verdict(reward=reward, trust=Trust.HIDDEN, grader="cases/1", graded_hash="sha256:0")
    return Trajectory(
        id=name, task=Task(key=key, prompt=f"solve {key}"), turns=(turn(0), turn(1)),
        stop=StopReason.FINISHED, runtime_version="1", profile=COMPACT_1.name,
        profile_hash=COMPACT_1.hash, template_hash="t", tools_hash=COMPACT_1.tools_hash,
        policy="p", started=1.0, ended=2.0, verdict=verdict,
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    with LogStore.open(path) as store:
        for run in (
            a_run("a1", "a", 1.0), a_run("b1", "b", 0.0), a_run("a2", "a", 0.0), a_run("b2", "b", 1.0),
            a_run("a3", "a", 0.25), a_run("c1", "c", 1.0), a_run("a4", "a", 1.0, tokens=False),
        ):  # fmt: skip
            store.append(run)
    return path


def export(*arguments: str | Path) -> list[dict[str, object]]:
    done = CliRunner().invoke(cli, ["export", *(str(a) for a in arguments)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_row_holds_the_tokens_and_the_advantage_within_its_task(log: Path) -> None:
    rows = export("--format", "tokens", "--log", log)
    assert [row["run"] for row in rows] == ["a1", "a2", "a3", "b1", "b2"]
    first = rows[0]
    assert first["prompt_ids"] == [1, 2, 10]
    assert first["completion_ids"] == [7, 9, 1, 2, 11, 7, 9]
    assert first["completion_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert first["logprobs"] == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0, -0.25]
    a, b, c = group_advantages((1.0, 0.0, 0.25))
    assert [row["advantages"][0] for row in rows[:3]] == [a, b, c]  # type: ignore[index]
    assert first["advantages"] == [a, a, 0.0, 0.0, 0.0, a, a]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.25, 0.0, 1.0]


def test_forks_of_a_step_are_a_group_beside_the_runs_of_their_task(log: Path) -> None:
    with LogStore.open(log) as store:
        parent = store.get("a1")
        for name, reward in (("f5", 1.0), ("f6", 0.0)):
            fork = a_run(name, "a", reward)
            turns = (parent.turns[0], fork.turns[1])
            store.append(
                fork.model_copy(
                    update={"turns": turns, "parent": "a1", "parent_step": 1, "task": parent.task}
                )
            )
    rows = {row["run"]: row for row in export("--format", "tokens", "--log", log)}
    assert set(rows) == {"a1", "a2", "a3", "b1", "b2", "f5", "f6"}
    assert rows["f5"]["task"] == "a"
    # what was taken over from the parent is prompt, and a fork is compared with forks
    assert rows["f5"]["completion_ids"] == [7, 13]
    assert (rows["f5"]["advantages"], rows["f6"]["advantages"]) == ([0.5] * 2, [-0.5] * 2)
    assert rows["a1"]["advantages"][0] == pytest.approx(1.0 - 1.25 / 3)


def test_without_a_baseline_a_lone_run_is_a_row_too(log: Path) -> None:
    rows = export("--format", "tokens", "--baseline", "none", "--task", "c", "--log", log)
    assert [(row["run"], row["advantages"][0]) for row in rows] == [("c1", 1.0)]  # type: ignore[index]


def test_what_was_left_out_is_counted_by_its_reason(log: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["export", "--format", "tokens", "--log", str(log), "-o", str(tmp_path / "rows.jsonl")]
    )
    assert "1 (text-only)" in done.stderr
    assert "1 (lone in its group" in done.stderr
    assert "5 rows in" in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--format", "excel"], "'excel' is not"),
        (["--format", "tokens", "--task", "none*"], "it takes two that are graded"),
        (["--format", "tokens", "--successes"], "No such option"),
        (["--format", "tokens", "--since", "soon"], "'soon' is no time"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_sentence(log: Path, flags: list[str], says: str) -> None:
    with pytest.raises((UsageError, typer.TyperException), match=says) as problem:
        export(*flags, "--log", log)
    assert getattr(problem.value, "exit_code", None) == 2
