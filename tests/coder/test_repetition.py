"""Repetition: answers that go round in circles are ended soon; nothing else is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_api import KEY, Say, strict_api

from nano_coder.config import AgentConfig
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.opening import open_policy
from nano_coder.models.repetition import LEAST, LONGEST, TIMES, Repetition
from nano_shared.policy import Conversation
from nano_shared.types import Finish, Message, Role, Sampling


def ended_at(tokens: list[int]) -> int | None:
    """Number of tokens after which it is found."""
    repetition = Repetition()
    return next((n for n, token in enumerate(tokens, 1) if repetition.take(token)), None)


def periodic(tokens: list[int]) -> bool:
    """The definition, by comparing every period."""
    for period in range(1, LONGEST + 1):
        length = max(TIMES * period, LEAST)
        tail = tokens[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


@settings(max_examples=20, deadline=None)
@given(
    before=st.lists(st.integers(0, 3), max_size=60),
    period=st.lists(st.integers(0, 4), min_size=1, max_size=70),
    rest=st.lists(st.integers(0, 3), max_size=30),
)
def test_it_is_found_at_the_first_token_at_which_the_definition_holds(
    before: list[int], period: list[int], rest: list[int]
) -> None:
    tokens = [*before, *(period * (1 + LEAST // len(period)))[:150], *rest]
    by_definition = next((n for n in range(1, len(tokens) + 1) if periodic(tokens[:n])), None)
    assert ended_at(tokens) == by_definition


@pytest.mark.parametrize("period", [1, 2, 31, 53, 133, LONGEST])
def test_a_period_is_found_after_three_times_or_96_tokens(period: int) -> None:
    before = list(range(1000, 1300))
    assert ended_at([*before, *list(range(period)) * 200]) == 300 + max(3 * period, 96)


def test_a_longer_period_and_text_that_varies_are_none() -> None:
    assert ended_at(list(range(LONGEST + 1)) * 4) is None
    drawn = random.Random(1)
    assert ended_at([drawn.choice((1, 2)) for _ in range(3000)]) is None
    numbered = [token for n in range(300) for token in (7, 8, 9, n, 10)]
    assert ended_at(numbered) is None


def test_source_code_does_not_repeat_itself() -> None:
    for file in sorted((Path(__file__).parents[2] / "nano_coder").rglob("*.py"))[::20]:
        assert not Repetition().take_text(file.read_text()), file


def test_a_text_is_read_in_pieces_of_any_size() -> None:
    text = "I fix it.\n" + "The task is done, and I call `submit`. " * 40
    sizes = {}
    for size in (1, 7, 1000):
        repetition = Repetition()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        sizes[size] = next(
            (n * size for n, piece in enumerate(pieces, 1) if repetition.take_text(piece)), None
        )
    assert sizes[1] is not None
    assert sizes[1] < 280
    assert sizes[7] is not None
    assert sizes[7] < 290
    assert sizes[1000] == 1000


def test_the_engine_ends_a_row_that_goes_round_and_its_log_probs_stay_as_they_were(
    tiny_folder: Path, one_thread: None
) -> None:
    policy: Any = open_policy(str(tiny_folder), AgentConfig(profile="compact-1")).policy
    with torch.no_grad():  # all tokens are equally likely, of which greedy sampling takes the first
        for parameter in policy.engine.model.parameters():
            parameter.zero_()
    asked = Conversation((Message(role=Role.USER, content="hi"),))
    greedy = Sampling(temperature=0, max_tokens=300)
    whole = policy.complete(asked, greedy)
    asked.ends_repetition = True
    ended = policy.complete(asked, greedy)
    assert (whole.finish, ended.finish) == (Finish.LENGTH, Finish.REPETITION)
    assert len(ended.tokens.sampled_ids) == LEAST
    assert ended.tokens.sampled_ids == whole.tokens.sampled_ids[:LEAST]
    assert ended.tokens.logprobs == whole.tokens.logprobs[:LEAST]


def test_a_hosted_answer_that_goes_round_is_ended_while_it_streams(tmp_path: Path) -> None:
    with strict_api(Say("I am done. " * 2000), Say("I am done. " * 2000), Say("ok")) as (server, _):
        policy = EndpointPolicy("m", server.base_url, KEY)
        asked = Conversation((Message(role=Role.USER, content="hi"),))
        assert len(policy.complete(asked, Sampling(max_tokens=9000)).text) == 22_000
        asked.ends_repetition = True
        completion = policy.complete(asked, Sampling(max_tokens=9000))
    assert completion.finish is Finish.REPETITION
    assert len(completion.text) < 22_000
