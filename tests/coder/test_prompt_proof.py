"""The prompts of a logged run are rebuilt token for token, or the first turn that differs is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits, prompt_proof
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.models.opening import open_policy
from nano_coder.run.execution import Runtime, run_task
from nano_shared.types import Sampling, Trajectory

WORK = (
    act("write_file", path="b.py", content="two\n"),
    act("read_file", path="b.py"),
    "no action at all",
    act("shell", command="seq 1 4000"),
    act("shell", command="tail -c 20 .nano/output_3.txt; cat b.py"),
    SUBMIT,
)


def a_run(folder: Path, texts: Any = WORK, **options: Any) -> tuple[Trajectory, Runtime]:
    """A run, read back from the log, and its runtime."""
    runtime = a_runtime(folder, texts, **options)
    run = run_task(a_task(limits=limits()), runtime, seed=1)
    return runtime.store.get(run.id), runtime


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trajectory, Runtime]:
    return a_run(tmp_path_factory.mktemp("logged"))


def changed(run: Trajectory, turn: int, place: int) -> Trajectory:
    """The run with one token of a prompt replaced in the log."""
    completion = run.turns[turn].completion
    assert completion.tokens is not None
    ids = list(completion.tokens.context_ids)
    ids[place] ^= 1
    tokens = completion.tokens.model_copy(update={"context_ids": tuple(ids)})
    damaged = run.turns[turn].model_copy(
        update={"completion": completion.model_copy(update={"tokens": tokens})}
    )
    return run.model_copy(update={"turns": (*run.turns[:turn], damaged, *run.turns[turn + 1 :])})


def test_every_prompt_is_rebuilt(logged: tuple[Trajectory, Runtime]) -> None:
    run, runtime = logged
    proof = prompt_proof(run, runtime)
    assert (proof.equal, proof.differing) == (len(run.turns), None)
    assert len(run.turns) == 6


@settings(deadline=None)
@given(turn=st.integers(0, 5), place=st.integers(0, 9))
def test_the_first_turn_that_differs_is_named(
    turn: int, place: int, logged: tuple[Trajectory, Runtime]
) -> None:
    run, runtime = logged
    damaged = changed(run, turn, place)
    proof = prompt_proof(damaged, runtime)
    assert proof.differing == damaged.turns[turn]
    assert proof.equal == turn
    assert run.turns[turn].completion.tokens is not None
    assert proof.rendered == run.turns[turn].completion.tokens.context_ids


def test_a_killed_run_is_proved_as_far_as_it_got(logged: tuple[Trajectory, Runtime]) -> None:
    run, runtime = logged
    killed = run.model_copy(update={"turns": run.turns[:2], "stop": None, "ended": None})
    assert prompt_proof(killed, runtime).equal == 2


def test_a_text_only_run_has_no_prompt_to_compare(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path, tokens=False)
    proof = prompt_proof(run, runtime)
    assert (proof.equal, proof.differing) == (0, None)


def test_a_rewritten_history_is_not_compared_and_what_follows_it_is(
    logged: tuple[Trajectory, Runtime],
) -> None:
    run, runtime = logged
    turns = []
    for turn in run.turns:
        tokens = turn.completion.tokens
        assert tokens is not None
        if turn.index >= 3:  # from here on as if a compaction had left its own summary
            context = tuple(b"user: in short") if turn.index == 3 else tokens.context_ids
            tokens = tokens.model_copy(update={"row": 1, "context_ids": context})
        completion = turn.completion.model_copy(update={"tokens": tokens})
        turns.append(turn.model_copy(update={"completion": completion}))
    proof = prompt_proof(run.model_copy(update={"turns": tuple(turns)}), runtime)
    assert (proof.equal, proof.differing) == (5, None)


def test_a_local_policy_proves_what_it_sampled(tmp_path: Path, tiny_folder: Path, one_thread: None) -> None:
    opened = open_policy(str(tiny_folder), dtype="float32")
    runtime = replace(
        a_runtime(tmp_path), policy=opened.policy, policy_name=opened.name,
        sampling=Sampling(temperature=1.0, max_tokens=8),
    )  # fmt: skip
    run = run_task(a_task(limits=limits(max_turns=3)), runtime, seed=1)
    proof = prompt_proof(runtime.store.get(run.id), runtime, opened.policy)
    assert proof.equal == len(run.turns) > 1
