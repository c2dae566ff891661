"""Repetition: answers that go round in circles are ended soon; nothing else is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.models.repetition import LEAST, LONGEST, TIMES, Repetition


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


@settings(max_examples=60, deadline=None)
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
    assert ended_at(list(range(LONGEST + 1)) * 5) is None
    drawn = random.Random(1)
    assert ended_at([drawn.choice((1, 2)) for _ in range(20_000)]) is None
    numbered = [token for n in range(2000) for token in (7, 8, 9, n, 10)]
    assert ended_at(numbered) is None


def test_source_code_does_not_repeat_itself() -> None:
    for file in sorted((Path(__file__).parents[2] / "nano_coder").rglob("*.py"))[:60]:
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
