"""Verification certifies what may train a policy gradient, and names each reason why a run may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from executions import SUBMIT, a_runtime, a_task, act

from nano_coder.run.execution import grade_run, run_task
from nano_coder.verify.trainable import verify
from nano_shared.types import Sampling, StopReason, ToolCall, Trajectory, Trust


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    runtime = a_runtime(tmp_path_factory.mktemp("log"), [act("shell", command="echo 2 > a.py"), SUBMIT])
    return grade_run(run_task(a_task(check="grep -q 2 a.py"), runtime), runtime)


def blocking(trajectory: Trajectory) -> list[str]:
    return [finding.kind for finding in verify(trajectory) if finding.blocks]


def test_a_good_run_may_train(good: Trajectory) -> None:
    assert good.reward == 1
    assert blocking(good) == []
    assert [finding.kind for finding in verify(good)] == ["ended", "tokens", "interface", "verdict"]
    assert (
        verify(good)[1].text == f"{good.num_sampled_tokens} sampled tokens in 2 turns, each with its log-prob"
    )


def with_turn(run: Trajectory, number: int, **changes: Any) -> Trajectory:
    turns = list(run.turns)
    turns[number] = turns[number].model_copy(update=changes)
    return run.model_copy(update={"turns": tuple(turns)})


def with_completion(run: Trajectory, number: int, **changes: Any) -> Trajectory:
    completion = run.turns[number].completion.model_copy(update=changes)
    return with_turn(run, number, completion=completion)


def with_tokens(run: Trajectory, number: int, **changes: Any) -> Trajectory:
    tokens = run.turns[number].completion.tokens
    assert tokens
    return with_completion(run, number, tokens=tokens.model_copy(update=changes))


def with_verdict(run: Trajectory, **changes: Any) -> Trajectory:
    assert run.verdict
    return run.model_copy(update={"verdict": run.verdict.model_copy(update=changes)})


DAMAGES: dict[str, Callable[[Trajectory], Trajectory]] = {
    "unfinished": lambda run: run.model_copy(update={"stop": None}),
    "failure of ours scored": lambda run: run.model_copy(update={"stop": StopReason.POLICY_ERROR}),
    "no turns": lambda run: run.model_copy(update={"turns": ()}),
    "text-only": lambda run: with_completion(run, 1, tokens=None),
    "broken rows": lambda run: with_tokens(run, 0, row=1),
    "missing ids": lambda run: with_tokens(run, 1, context_ids=()),
    "truncated sampling": lambda run: with_completion(run, 1, sampling=Sampling(top_p=0.9)),
    "greedy": lambda run: with_completion(run, 0, sampling=Sampling(temperature=0)),
    "other profile": lambda run: run.model_copy(update={"profile_hash": "sha256:0"}),
    "calls differ from text": lambda run: with_turn(run, 0, calls=(ToolCall(name="submit"),)),
    "no verdict": lambda run: run.model_copy(update={"verdict": None}),
    "no reward": lambda run: with_verdict(run, reward=None),
    "low trust": lambda run: with_verdict(run, trust=Trust.JUDGE),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_run_may_not_and_the_reason_is_named(good: Trajectory, kind: str) -> None:
    assert blocking(DAMAGES[kind](good)) == [kind]


def test_top_k_and_another_tools_hash_count_too(good: Trajectory) -> None:
    assert blocking(with_completion(good, 0, sampling=Sampling(top_k=5))) == ["truncated sampling"]
    assert blocking(good.model_copy(update={"tools_hash": "sha256:0"})) == ["other tools"]
    assert blocking(good.model_copy(update={"profile": "gone-1"})) == ["other profile"]
    assert blocking(with_tokens(good, 1, sampled_ids=(), logprobs=())) == ["missing ids"]


def test_a_failure_of_ours_without_a_reward_is_told_apart_from_one_that_was_scored(good: Trajectory) -> None:
    failed = with_verdict(good.model_copy(update={"stop": StopReason.SANDBOX_ERROR}), reward=None)
    assert blocking(failed) == ["failure of ours", "no reward"]


def test_a_refused_action_is_no_damage(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, ["no action", SUBMIT])
    run = grade_run(run_task(a_task(check="true"), runtime), runtime)
    assert blocking(run) == []


def test_a_run_of_an_endpoint_is_text_only(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [SUBMIT], tokens=False)
    run = grade_run(run_task(a_task(check="true"), runtime), runtime)
    assert blocking(run) == ["text-only"]
