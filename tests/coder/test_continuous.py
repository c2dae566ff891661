"""Rows that join, wait, leave and come back have the log-probs of a fresh forward pass, and read little."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.models.local.attention import ROUND, Arena, KVShape
from nano_coder.models.local.continuous_batching import ContinuousDecoder, TokenCounts
from nano_coder.models.local.engine import Engine, kv_token_bytes
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest
from nano_coder.models.weights import load_policy
from nano_shared.types import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, eos_ids=frozenset(), context_limit=1024, **options)


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 900), k=length))


def counts(engine: Engine) -> TokenCounts:
    assert isinstance(engine.decoder, ContinuousDecoder)
    return engine.decoder.counts


def finish(engine: Engine, rows: Sequence[DecodingRow]) -> None:
    while any(row.finish is None for row in rows):
        engine.step()


def turn(
    engine: Engine, row: DecodingRow, observation: tuple[int, ...], *, seed: int = 0, length: int = 4
) -> GenerationRequest:
    """The request of the next turn: the row as it stands, and what its agent observed."""
    ids = (*row.request.ids, *row.ids, *observation)
    return GenerationRequest(ids, Sampling(max_tokens=length), seed, row.request.owner)


def assert_exact(engine: Engine, rows: Sequence[DecodingRow]) -> None:
    scores = engine.score([(*row.request.ids, *row.ids) for row in rows])
    for row, expected in zip(rows, scores, strict=True):
        assert row.logprobs == pytest.approx(expected[len(row.request.ids) - 1 :], abs=3e-4)


def group(prompt: tuple[int, ...], size: int, *, first: int = 0, length: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, Sampling(max_tokens=length), seed, seed)
        for seed in range(first, first + size)
    ]


def test_a_prompt_is_read_once_a_group(model: Any) -> None:
    engine = engine_of(model)
    rows = engine.add_requests([*group(tokens(1, 50), 8), *group(tokens(2, 30), 8, first=8)])
    finish(engine, rows)
    assert counts(engine).prefilled == 80
    assert_exact(engine, rows)


def test_what_prompts_begin_with_is_read_once(model: Any) -> None:
    system = tokens(0, 60)
    prompts = [system + tokens(seed, 10 + seed) for seed in range(1, 5)]
    engine = engine_of(model)
    rows = engine.add_requests([r for i, p in enumerate(prompts) for r in group(p, 1 + i % 2, first=10 * i)])
    finish(engine, rows)
    assert counts(engine).prefilled == 60 + sum(len(p) - 60 for p in prompts)
    assert_exact(engine, rows)


def test_only_the_observation_is_read_between_turns(model: Any) -> None:
    engine = engine_of(model)
    rows = engine.add_requests(group(tokens(1, 40), 4))
    finish(engine, rows)
    for number in range(3):
        before = counts(engine).prefilled
        rows = engine.add_requests(
            [turn(engine, row, tokens(100 + number, 5 + i)) for i, row in enumerate(rows)]
        )
        finish(engine, rows)
        # the last sampled token was never fed
        assert counts(engine).prefilled - before == sum(5 + i + 1 for i in range(4))
        assert_exact(engine, rows)


def test_places_shown_in_turn_are_read_once(model: Any) -> None:
    """The prompts of repair-1: another place each turn, and what was tried behind one that comes again."""
    begins = tokens(0, 40)
    places = [[begins + tokens(10 * owner + place, 50) for place in range(4)] for owner in range(2)]
    engine, read, before = engine_of(model), list[int](), 0
    for number in (0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1):
        prompts = [shown[number] + tokens(len(read), len(read)) for shown in places]
        rows = engine.add_requests(
            [GenerationRequest(ids, Sampling(max_tokens=4), 1, owner) for owner, ids in enumerate(prompts)]
        )
        finish(engine, rows)
        assert_exact(engine, rows)
        read.append(counts(engine).prefilled - before)
        before += read[-1]
    first = 40 + 2 * 50  # what prompts begin with is read once
    assert read == [first, *(2 * n + (100 if n in (2, 5, 9) else 0) for n in range(1, 12))]


def rows_of(model: Any, count: int) -> int:
    """Bytes of the KV of so many rows of 256 tokens."""
    return count * (256 + ROUND) * kv_token_bytes(model)


def test_rows_over_the_budget_are_read_again_and_stay_exact(model: Any) -> None:
    rich, poor = engine_of(model), engine_of(model, kv_bytes=130 * kv_token_bytes(model))

    def episode(engine: Engine) -> list[list[int]]:
        rows = engine.add_requests(group(tokens(1, 40), 4))
        finish(engine, rows)
        rows = engine.add_requests([turn(engine, row, tokens(7, 9)) for row in rows])
        finish(engine, rows)
        assert_exact(engine, rows)
        return [row.ids for row in rows]

    assert episode(rich) == episode(poor)
    assert isinstance(poor.decoder, ContinuousDecoder)
    assert poor.decoder.cache.evictions > 0
    assert counts(poor).prefilled > counts(rich).prefilled


def test_a_row_that_is_rewritten_is_read_anew(model: Any) -> None:
    engine = engine_of(model)
    (row,) = engine.add_requests(group(tokens(1, 20), 1))
    finish(engine, [row])
    other = (*tokens(1, 20)[:10], *tokens(5, 30))
    (row,) = engine.add_requests([GenerationRequest(other, Sampling(max_tokens=4), 1, 0)])
    finish(engine, [row])
    assert_exact(engine, [row])


def test_rows_join_a_batch_that_is_under_way(model: Any) -> None:
    engine = engine_of(model)
    early = engine.add_requests(group(tokens(1, 30), 3, length=20))
    for _ in range(5):
        engine.step()
    late = engine.add_requests([*group(tokens(1, 30), 2, first=3), *group(tokens(2, 90), 2, first=5)])
    finish(engine, [*early, *late])
    assert_exact(engine, [*early, *late])
    assert counts(engine).prefilled == 120


def test_a_row_that_is_dropped_leaves_the_others_alone(model: Any) -> None:
    engine = engine_of(model)
    rows = engine.add_requests([*group(tokens(1, 30), 4, length=9), *group(tokens(2, 9), 2, first=4)])
    engine.step()
    engine.drop([rows[0], rows[4]])
    finish(engine, [row for row in rows if row not in (rows[0], rows[4])])
    assert_exact(engine, [rows[1], rows[2], rows[3], rows[5]])
    assert not engine.busy


def test_slots_that_grow_keep_what_they_hold_and_are_zero_elsewhere() -> None:
    arena = Arena(KVShape(layers=2, keys=1, dim=4, dtype=torch.bfloat16, device=torch.device("cpu")))
    arena.reserve(2, 10, 0)
    arena.slot(1)[:, :, :, :3] = 1.0
    arena.reserve(3, 200, 2)
    assert arena.kv.shape == (2, 2, 3, 1, 256, 4)
    held = torch.zeros_like(arena.kv)
    held[:, :, 1, :, :3] = 1.0
    assert torch.equal(arena.kv, held)


def test_the_same_rows_are_decoded_bit_for_bit_alike(model: Any) -> None:
    def episode() -> list[tuple[list[int], list[float]]]:
        engine = engine_of(model, max_batch=5)
        rows = engine.add_requests([*group(tokens(1, 30), 6, length=9), *group(tokens(2, 9), 3, first=6)])
        finish(engine, rows)
        later = engine.add_requests([turn(engine, row, tokens(3, 8), seed=9) for row in rows])
        finish(engine, later)
        return [(row.ids, row.logprobs) for row in (*rows, *later)]

    assert episode() == episode()


@pytest.mark.parametrize("through_data", [False, True])
def test_kv_never_outlives_its_weights(tiny_folder: Path, through_data: bool) -> None:
    model: Any = load_policy(str(tiny_folder)).model
    engine = engine_of(model)
    rows = engine.add_requests(group(tokens(1, 30), 2))
    finish(engine, rows)
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(-1.5)
    rows = engine.add_requests([turn(engine, row, tokens(3, 8)) for row in rows])
    finish(engine, rows)
    assert_exact(engine, rows)


def test_weights_that_change_under_a_row_are_refused(tiny_folder: Path) -> None:
    model: Any = load_policy(str(tiny_folder)).model
    engine = engine_of(model)
    engine.add_requests(group(tokens(1, 30), 2))
    engine.step()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights changed while rows were being decoded"):
        engine.step()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_course_of_a_batch_is_exact(model: Any, data: st.DataObject) -> None:
    """Groups of any sizes on prompts with any common beginnings, few slots, little memory, several turns."""
    budget = data.draw(st.sampled_from([1, 2, 4, 1000]), label="rows of memory")
    slots = data.draw(st.integers(1, 6), label="slots")
    engine = engine_of(model, max_batch=slots, kv_bytes=rows_of(model, budget))
    system = tokens(0, data.draw(st.integers(1, 50), label="common"))
    requests: list[GenerationRequest] = []
    for number in range(data.draw(st.integers(1, 4), label="groups")):
        prompt = system + tokens(number, data.draw(st.integers(0, 40), label="own"))
        size = data.draw(st.integers(1, 3), label="size")
        length = data.draw(st.integers(1, 7), label="length")
        requests += group(prompt, size, first=len(requests), length=length)
    rows = engine.add_requests(requests)
    finish(engine, rows)
    assert_exact(engine, rows)
    for _ in range(data.draw(st.integers(0, 2), label="turns")):
        going = [row for row in rows if data.draw(st.booleans())]
        observed = data.draw(st.integers(0, 40), label="observed")
        rows = engine.add_requests([turn(engine, row, tokens(observed, observed)) for row in going])
        finish(engine, rows)
        assert_exact(engine, rows)
