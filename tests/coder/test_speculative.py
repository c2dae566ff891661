"""Speculative decoding changes how many steps a row takes, and none of its tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.models.local import continuous_batching as speculative
from nano_coder.models.local.continuous_batching import (
    CONTEXT,
    ContinuousDecoder,
    NGramSpeculator,
    TokenCounts,
)
from nano_coder.models.local.engine import Engine
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest
from nano_shared.types import Finish, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, **{"eos_ids": frozenset(), "context_limit": 512, **options})


def counts(engine: Engine) -> TokenCounts:
    assert isinstance(engine.decoder, ContinuousDecoder)
    return engine.decoder.counts


def decoded(engine: Engine, requests: list[GenerationRequest]) -> list[DecodingRow]:
    rows = engine.add_requests(requests)
    while any(row.finish is None for row in rows):
        engine.step()
    return rows


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 900), k=length))


def exact(engine: Engine, rows: list[DecodingRow]) -> None:
    temperatures = {row.request.sampling.temperature for row in rows}
    for temperature in temperatures:
        alike = [row for row in rows if row.request.sampling.temperature == temperature]
        scores = engine.score([(*row.request.ids, *row.ids) for row in alike], temperature or 1.0)
        for row, expected in zip(alike, scores, strict=True):
            assert row.logprobs == pytest.approx(expected[len(row.request.ids) - 1 :], abs=2e-4)


@pytest.mark.some(3)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_row_says_the_same_with_drafts_and_without(model: Any, data: st.DataObject) -> None:
    """Whatever the batch, the temperature, the length, and the token that ends a row; over two turns."""
    slots = data.draw(st.integers(1, 6), label="slots")
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0]), label="temperature"),
        max_tokens=data.draw(st.integers(1, 30), label="length"),
    )
    groups = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), label="groups")
    asked = [prompt(number, 5 + 11 * number) for number, size in enumerate(groups) for _ in range(size)]
    requests = [GenerationRequest(ids, sampling, seed, seed) for seed, ids in enumerate(asked)]
    eos = frozenset(data.draw(st.sets(st.integers(3, 900), max_size=40), label="ends"))
    said = []
    for budget in (speculative._STEP_TOKENS, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculative, "_STEP_TOKENS", budget)
            engine = engine_of(model, max_batch=slots, eos_ids=eos)
            first = decoded(engine, requests)
            again = [
                GenerationRequest(
                    (*row.request.ids, *row.ids, *prompt(7, 6)), sampling, 50 + nth, row.request.owner
                )
                for nth, row in enumerate(first)
            ]
            rows = [*first, *decoded(engine, again)]
            exact(engine, rows)
            said.append([(row.ids, row.finish) for row in rows])
            if not budget:
                assert counts(engine).num_draft_tokens == 0
    assert said[0] == said[1]


def test_what_was_said_before_takes_fewer_steps(model: Any) -> None:
    engine = engine_of(model)
    ask = [GenerationRequest(prompt(1, 20), Sampling(max_tokens=31), seed=5)]
    (first,) = decoded(engine, ask)
    assert counts(engine).steps == 30  # the first token is drawn from the logits of the prompt
    (second,) = decoded(engine, ask)
    assert second.ids == first.ids
    assert counts(engine).steps - 30 <= 10
    assert counts(engine).num_accepted_tokens >= 20
    assert counts(engine).decoded == 60
    exact(engine, [first, second])


def test_a_row_ends_within_its_draft(model: Any) -> None:
    engine = engine_of(model)
    (free,) = decoded(engine, [GenerationRequest(prompt(1, 20), Sampling(max_tokens=31), seed=5)])
    for length in (8, 9, 10, 11):
        (short,) = decoded(engine, [GenerationRequest(prompt(1, 20), Sampling(max_tokens=length), seed=5)])
        assert (short.ids, short.finish) == (free.ids[:length], Finish.LENGTH)
    assert counts(engine).num_accepted_tokens > 0


def test_a_guess_goes_by_what_came_last() -> None:
    known = NGramSpeculator()
    known.observe([1, 2, 3, 4, 5])
    assert known.propose([9, 1, 2, 3], 8) == [4, 5]
    known.observe([1, 2, 3, 7])
    assert known.propose([1, 2, 3], 8) == [7]
    assert known.propose([2, 3], 8) == []
    assert known.propose([2, 3, 4], 0) == []


def test_a_draft_is_no_longer_than_is_worth_it() -> None:
    known = NGramSpeculator()
    known.observe([5] * (CONTEXT + 1))
    assert known.propose([5] * CONTEXT, 100) == [5] * speculative._LONGEST_DRAFT


def test_a_full_batch_has_no_room() -> None:
    assert NGramSpeculator().budget(speculative._STEP_TOKENS) == 0
    assert NGramSpeculator().budget(1) == speculative._STEP_TOKENS - 1


def test_drafts_that_do_not_hold_are_tried_now_and_then_until_they_do() -> None:
    known = NGramSpeculator()
    known.record(num_draft_tokens=40, num_accepted_tokens=0)
    tried = [known.budget(1) > 0 for _ in range(4 * speculative._RETRY_STEPS)]
    assert sum(tried) == 4
    for _ in range(4):
        known.record(num_draft_tokens=40, num_accepted_tokens=30)
    assert all(known.budget(1) > 0 for _ in range(4 * speculative._RETRY_STEPS))


def test_guesses_begin_anew_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "_MAX_NGRAMS", 5)
    known = NGramSpeculator()
    for first in range(0, 40, 4):
        known.observe([first, first + 1, first + 2, first + 3])
    assert known.propose([36, 37, 38], 1) == [39]
    assert known.propose([0, 1, 2], 1) == []
    assert len(known._next) <= 7
