"""The likeliest answers to one prompt, one after another, at temperature 0."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from executions import a_runtime
from hypothesis import given
from hypothesis import strategies as st
from test_repair import CHECK, broken, seven_answers, shown

from nano_coder.agent.best_first import next_beginning
from nano_coder.agent.profiles import REPAIR_1
from nano_coder.config import CoreConfig
from nano_coder.models.opening import open_policy
from nano_coder.run.execution import RunHooks, Runtime, resume_run, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.verify.trainable import RefusalCode, verify
from nano_shared.policy import Beginning, Likeliest
from nano_shared.types import Limits, Sampling, StopReason, Trajectory, Turn, TurnTokens

__all__ = ["seven_answers"]
EOS, LONGEST = 0, 3
WEIGHTS = st.lists(st.floats(0.05, 1), min_size=3, max_size=3)
Model = dict[tuple[int, ...], Likeliest]
"""a text of tokens 1 and 2 -> what may follow, EOS included"""


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Over all texts of up to LONGEST tokens, after which only EOS follows."""
    model: Model = {}
    texts: list[tuple[int, ...]] = [()]
    for text in texts:
        weights = [1.0, 0.0, 0.0] if len(text) == LONGEST else draw(WEIGHTS)
        total = sum(weights)
        found = [(token, math.log(weight / total)) for token, weight in enumerate(weights) if weight]
        model[text] = tuple(sorted(found, key=lambda one: -one[1]))
        texts += [(*text, token) for token, _ in found if token != EOS]
    return model


def greedy(model: Model, beginning: Beginning) -> tuple[TurnTokens, list[Likeliest]]:
    path, places = list(beginning), list[Likeliest]()
    while not path or path[-1][0] != EOS:
        places.append(model[tuple(token for token, _ in path)])
        path.append(places[-1][0])
    ids, logprobs = zip(*path, strict=True)
    return TurnTokens(context_ids=(9,), sampled_ids=ids, logprobs=logprobs), places


@given(models())
def test_every_text_is_answered_once_the_likelier_beginnings_first(model: Model) -> None:
    answers: list[tuple[TurnTokens, list[Likeliest]]] = []
    costs = []
    while (beginning := next_beginning(answers, {EOS})) is not None:
        costs.append(-sum(logprob for _, logprob in beginning))
        answers.append(greedy(model, beginning))
    texts = [tokens.sampled_ids[:-1] for tokens, _ in answers]
    assert sorted(texts) == sorted(model)
    assert len({*texts}) == len(texts)
    assert costs == sorted(costs)
    assert texts[0] == greedy(model, ())[0].sampled_ids[:-1]


def test_two_tokens_that_both_end_are_one_answer() -> None:
    tokens = TurnTokens(context_ids=(9,), sampled_ids=(5, 0), logprobs=(-0.1, -0.2))
    places: list[Likeliest] = [((5, -0.1), (6, -3.0)), ((0, -0.2), (1, -1.9))]
    assert next_beginning([(tokens, places)], {0, 1}) == ((6, -3.0),)


# ------------------------------------------------------------------------ with weights, under repair-1


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Any:
    return open_policy(str(tiny_folder), CoreConfig(profile="repair-1")).policy


def repairing(folder: Path, policy: Any, **changes: Any) -> Runtime:
    sampling = Sampling(temperature=0.0, max_tokens=12)
    fields = {"policy": policy, "profile": REPAIR_1, "sandbox": open_sandbox(), "sampling": sampling}
    return a_runtime(folder, **fields | changes)


def answers(run: Trajectory) -> dict[str, list[tuple[int, ...]]]:
    """The sampled ids by the prompt that they answer."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for turn, prompt in zip(run.turns, shown(run), strict=True):
        assert turn.completion.tokens is not None
        found.setdefault(prompt, []).append(turn.completion.tokens.sampled_ids)
    return found


def a_repair(**changes: Any) -> Any:
    return broken(**{"check": CHECK, "limits": Limits(max_turns=20, max_tokens=4000)} | changes)


def test_at_temperature_0_no_answer_to_a_place_is_given_twice(tmp_path: Path, policy: Any) -> None:
    runtime = repairing(tmp_path, policy)
    run = run_task(a_repair(), runtime)
    assert (run.stop, len(run.turns)) == (StopReason.GAVE_UP, 7)
    found = answers(run)
    assert len(found) == 2, "the prompt of a place stays as it is"
    assert all(len({*ids}) == len(ids) for ids in found.values())
    first, second = (turn.completion for turn in run.turns[:2])
    assert first.sampling.given == 0
    assert first.text == policy.complete(*asked(run, runtime)).text
    assert second.sampling.given > 0
    assert not any("Tried" in prompt for prompt in found)


def asked(run: Trajectory, runtime: Runtime) -> tuple[Any, Sampling]:
    from nano_coder.agent.profiles import open_conversation

    conversation = open_conversation(REPAIR_1, run.task, ())
    conversation.replace_new(run.turns[0].messages)
    return conversation, runtime.sampling


def test_the_log_probs_of_what_was_given_are_the_policys(tmp_path: Path, policy: Any) -> None:
    run = run_task(a_repair(), repairing(tmp_path, policy))
    for turn in run.turns:
        tokens = turn.completion.tokens
        assert tokens is not None
        row = (*tokens.context_ids, *tokens.sampled_ids)
        scores = policy.score(row, 0)[-len(tokens.sampled_ids) :]
        assert [s.logprob for s in scores] == pytest.approx(tokens.logprobs, abs=1e-4)
    assert RefusalCode.GREEDY in [finding.kind for finding in verify(run) if finding.blocks]


def test_a_run_that_was_stopped_goes_on_with_the_answers_that_it_would_have_given(
    tmp_path: Path, policy: Any
) -> None:
    whole = run_task(a_repair(), repairing(tmp_path / "whole", policy))

    def interrupt(turn: Turn) -> None:
        if turn.index == 5:
            raise KeyboardInterrupt

    cut = run_task(a_repair(), repairing(tmp_path / "cut", policy, hooks=RunHooks(turn=interrupt)))
    assert (cut.stop, len(cut.turns)) == (StopReason.INTERRUPTED, 6)
    resumed = resume_run(cut.id, repairing(tmp_path / "cut", policy))
    assert [answers(resumed), len(resumed.turns)] == [answers(whole), 7]


def test_a_sampled_run_is_shown_what_it_tried(tmp_path: Path, policy: Any) -> None:
    runtime = repairing(tmp_path, policy, sampling=Sampling(temperature=1.0, max_tokens=12))
    run = run_task(a_repair(), runtime, seed=3)
    assert all(turn.completion.sampling.given == 0 for turn in run.turns)
    assert "Tried, and the tests still fail:" in shown(run)[1]
