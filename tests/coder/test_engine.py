"""The engine samples from the model's own distribution, and its log-probs are exact."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_coder.models.local.engine import Engine, ModuleDecoder
from nano_coder.models.local.sampler import GenerationRequest, Likeliest
from nano_coder.models.weights import load_policy
from nano_shared.errors import ContextFull, UsageError
from nano_shared.types import Finish, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(model: Any, eos_ids: frozenset[int] = frozenset()) -> Engine:
    return Engine(model, eos_ids=eos_ids, context_limit=1024)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 900), k=length))


def requests(*lengths: int, **sampling: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt(seed, length), Sampling(max_tokens=12, **sampling), seed)
        for seed, length in enumerate(lengths)
    ]


def plain_logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """[L, V] of one row alone, without cache, mask or padding."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def plain_logprobs(model: Any, ids: tuple[int, ...], sampled: tuple[int, ...], temperature: float) -> Any:
    logits = plain_logits(model, ids + sampled)[len(ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[range(len(sampled)), list(sampled)].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("lengths", [(5, 17, 40, 1), (9, 9, 9)], ids=["ragged", "even"])
def test_logprobs_equal_a_plain_forward(model: Any, lengths: tuple[int, ...], temperature: float) -> None:
    batch = requests(*lengths, temperature=temperature)
    for request, sampled in zip(batch, engine_of(model).generate(batch), strict=True):
        expected = plain_logprobs(model, request.ids, sampled.ids, temperature)
        assert sampled.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_a_token_comes_with_the_likeliest_of_its_place(
    model: Any, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before top-k, at the temperature; also behind draft tokens, which the second of two equal rows has."""
    if padded:
        monkeypatch.setattr(
            "nano_coder.models.local.engine.choose_decoder",
            lambda model, *, max_batch, max_bytes: ModuleDecoder(
                model, max_batch=max_batch, max_tokens=max_bytes
            ),
        )
    engine, sampling = engine_of(model), Sampling(max_tokens=12, temperature=0.7, top_k=5)
    for top in (3, 0, 3):
        found: list[Likeliest] = []
        request = GenerationRequest(
            prompt(1, 20),
            sampling,
            1,
            on_token=lambda *given, found=found: found.append(given[2]) or True,
            top_logprobs=top,
        )
        (sampled,) = engine.generate([request])
        expected = plain_logits(model, request.ids + sampled.ids)[len(request.ids) - 1 : -1] / 0.7
        best = expected.log_softmax(-1).topk(top)
        assert [[token for token, _ in each] for each in found] == best.indices.tolist()
        for each, values in zip(found, best.values.tolist(), strict=True):
            assert [logprob for _, logprob in each] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_scores_equal_a_plain_forward(model: Any, temperature: float) -> None:
    rows = [prompt(seed, length) for seed, length in enumerate((2, 1, 31, 8))]
    scores = engine_of(model).score(rows, temperature)
    for row, row_scores in zip(rows, scores, strict=True):
        assert row_scores == pytest.approx(plain_logprobs(model, row[:1], row[1:], temperature), abs=1e-4)


def test_scores_may_begin_behind_the_prompt(model: Any) -> None:
    rows = [prompt(seed, length) for seed, length in enumerate((9, 7, 31))]
    engine = engine_of(model)
    for row, late, all_of_it in zip(rows, engine.score(rows, first=7), engine.score(rows), strict=True):
        assert len(late) == len(row) - 7
        assert late == pytest.approx(all_of_it[6:], abs=1e-5)


def test_the_head_does_not_run_on_a_prompt_that_is_not_scored(model: Any) -> None:
    seen: list[int] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: seen.append(given[0].shape[1])
    )
    engine_of(model).score([prompt(0, 40)], first=38)
    hook.remove()
    assert seen == [2]


def test_scores_of_many_rows_come_back_in_order(model: Any) -> None:
    """More tokens than one scoring batch holds."""
    rows = [prompt(seed, 20 + 97 * seed % 300) for seed in range(20)]
    engine = engine_of(model)
    together = engine.score(rows)
    assert [len(s) for s in together] == [len(row) - 1 for row in rows]
    assert together[13] == pytest.approx(engine.score([rows[13]])[0], abs=1e-4)


def test_a_row_is_independent_of_its_batch(model: Any) -> None:
    batch = requests(5, 30, 11, 11, 2, 60)
    engine = engine_of(model)
    together = engine.generate(batch)
    assert [engine.generate([request])[0].ids for request in batch] == [s.ids for s in together]
    assert [s.ids for s in engine.generate(batch[::-1])] == [s.ids for s in together[::-1]]


def test_the_same_prompt_with_other_seeds_gives_other_rows(model: Any) -> None:
    same = [GenerationRequest(prompt(0, 20), Sampling(max_tokens=12), seed) for seed in range(8, 16)]
    rows = [s.ids for s in engine_of(model).generate(same)]
    assert len(set(rows)) == 8
    alone = [engine_of(model).generate([request])[0].ids for request in same]
    # a draw that rounding alone moves over the boundary between two tokens may go either way
    assert sum(one == other for one, other in zip(rows, alone, strict=True)) >= 7


def test_a_seed_reproduces_bit_for_bit(model: Any) -> None:
    batch = requests(5, 17, 40)
    assert engine_of(model).generate(batch) == engine_of(model).generate(batch)


def test_no_seed_is_a_new_seed(model: Any) -> None:
    request = GenerationRequest(prompt(0, 5), Sampling(max_tokens=40))
    first, second = engine_of(model).generate([request, request])
    assert first.ids != second.ids


def test_rows_of_different_ends_finish_on_their_own(model: Any) -> None:
    """Rows that finish are cut out of the batch; the others must not notice."""
    batch = [
        GenerationRequest(prompt(seed, 4 + seed), Sampling(max_tokens=1 + 3 * seed), seed)
        for seed in range(10)
    ]
    engine = engine_of(model)
    together = engine.generate(batch)
    assert [len(s.ids) for s in together] == [1 + 3 * seed for seed in range(10)]
    for request, sampled in zip(batch, together, strict=True):
        assert engine.generate([request])[0].ids == sampled.ids
        expected = plain_logprobs(model, request.ids, sampled.ids, 1.0)
        assert sampled.logprobs == pytest.approx(expected, abs=1e-4)


def test_end_of_turn_stops_a_row_and_is_part_of_it(model: Any) -> None:
    free = engine_of(model).generate(requests(6, 12, 9))
    eos = free[1].ids[4]
    stopped = engine_of(model, frozenset({eos})).generate(requests(6, 12, 9))
    first = free[1].ids.index(eos)
    assert stopped[1].ids == free[1].ids[: first + 1]
    assert stopped[1].finish is Finish.STOP
    assert len(stopped[1].logprobs) == first + 1
    assert all(eos not in s.ids[:-1] for s in stopped)


def test_a_row_cut_by_length_says_so(model: Any) -> None:
    assert [s.finish for s in engine_of(model).generate(requests(6, 12))] == [Finish.LENGTH] * 2


def test_a_row_ends_where_the_context_does(model: Any) -> None:
    engine = Engine(model, eos_ids=frozenset(), context_limit=20)
    (sampled,) = engine.generate([GenerationRequest(prompt(0, 15), Sampling(max_tokens=12), 0)])
    assert (len(sampled.ids), sampled.finish) == (5, Finish.LENGTH)
    with pytest.raises(ContextFull, match="row of 20 tokens leaves no room in a context of 20"):
        engine.generate([GenerationRequest(prompt(0, 20), Sampling(), 0)])


def test_greedy_takes_the_likeliest_with_logprobs_of_temperature_one(model: Any) -> None:
    batch = requests(5, 17, temperature=0.0)
    for request, sampled in zip(batch, engine_of(model).generate(batch), strict=True):
        logits = plain_logits(model, request.ids + sampled.ids)[len(request.ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(sampled.ids)
        expected = plain_logprobs(model, request.ids, sampled.ids, 1.0)
        assert sampled.logprobs == pytest.approx(expected, abs=1e-4)


def test_greedy_and_sampled_rows_share_a_batch(model: Any) -> None:
    greedy, warm = requests(8, temperature=0.0)[0], requests(8, temperature=0.7)[0]
    together = engine_of(model).generate([greedy, warm, greedy])
    alone = [engine_of(model).generate([request])[0] for request in (greedy, warm, greedy)]
    assert [s.ids for s in together] == [s.ids for s in alone]


def frequencies(model: Any, ids: tuple[int, ...], count: int, **sampling: Any) -> dict[int, float]:
    draws = [GenerationRequest(ids, Sampling(max_tokens=1, **sampling), seed) for seed in range(count)]
    counts = Counter(s.ids[0] for s in engine_of(model).generate(draws))
    return {token: n / count for token, n in counts.items()}


def test_draws_follow_the_distribution(model: Any) -> None:
    ids, count = prompt(3, 10), 4000
    probs = torch.softmax(plain_logits(model, ids)[-1] / 0.5, -1)
    drawn = frequencies(model, ids, count, temperature=0.5)
    likely = probs.topk(5)
    assert likely.values[0] < 0.9  # otherwise this tests nothing
    for p, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
        assert drawn.get(token, 0.0) == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5)


def test_top_k_draws_only_the_k_likeliest_and_renormalises(model: Any) -> None:
    ids = prompt(3, 10)
    logits = plain_logits(model, ids)[-1]
    likely = set(logits.topk(3).indices.tolist())
    assert set(frequencies(model, ids, 300, top_k=3)) <= likely
    (sampled,) = engine_of(model).generate([GenerationRequest(ids, Sampling(max_tokens=1, top_k=3), 1)])
    kept = torch.log_softmax(logits.topk(3).values, -1)
    place = logits.topk(3).indices.tolist().index(sampled.ids[0])
    assert sampled.logprobs[0] == pytest.approx(kept[place].item(), abs=1e-5)


def test_top_p_draws_the_smallest_set_that_reaches_p(model: Any) -> None:
    ids = prompt(3, 10)
    probs = torch.softmax(plain_logits(model, ids)[-1], -1)
    ordered, order = probs.sort(descending=True)
    size = int((ordered.cumsum(0) < 0.5).sum()) + 1
    nucleus = set(order[:size].tolist())
    assert set(frequencies(model, ids, 300, top_p=0.5)) <= nucleus
    (sampled,) = engine_of(model).generate([GenerationRequest(ids, Sampling(max_tokens=1, top_p=0.5), 1)])
    expected = (probs[sampled.ids[0]] / ordered[:size].sum()).log().item()
    assert sampled.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_the_smallest_top_p_is_greedy(model: Any) -> None:
    batch = requests(5, 17, top_p=1e-9)
    greedy = requests(5, 17, temperature=0.0)
    sampled = engine_of(model).generate(batch)
    assert [s.ids for s in sampled] == [s.ids for s in engine_of(model).generate(greedy)]
    assert all(p == pytest.approx(0.0, abs=1e-6) for s in sampled for p in s.logprobs)


def test_a_module_in_training_comes_back_as_it_was(tiny_folder: Path) -> None:
    model: Any = load_policy(str(tiny_folder)).model
    model.train()
    model.model.layers[0].eval()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = requests(5, 9)
    assert engine_of(model).generate(batch) == engine_of(model).generate(batch), "dropout was on"
    assert model.training
    assert not model.model.layers[0].self_attn.training
    assert model.model.layers[1].self_attn.training


def test_sampling_leaves_nothing_that_breaks_training(tiny_folder: Path) -> None:
    model: Any = load_policy(str(tiny_folder)).model
    model.train()
    engine = engine_of(model)
    engine.generate(requests(5, 9))
    engine.score([prompt(0, 8)])
    ids = torch.tensor([prompt(0, 8)])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert torch.is_grad_enabled()


def test_the_engine_follows_the_live_weights(tiny_folder: Path) -> None:
    model: Any = load_policy(str(tiny_folder)).model
    engine = engine_of(model)
    row = prompt(0, 8)
    before = engine.score([row])[0]
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    after = engine.score([row])[0]
    assert after != pytest.approx(before, abs=1e-3)
    assert after == pytest.approx(plain_logprobs(model, row[:1], row[1:], 1.0), abs=1e-4)


def test_bfloat16_samples_and_scores(tiny_folder: Path) -> None:
    model: Any = load_policy(str(tiny_folder), dtype="bfloat16").model
    batch = requests(5, 17, 40)
    engine = engine_of(model)
    for request, sampled in zip(batch, engine.generate(batch), strict=True):
        scores = engine.score([request.ids + sampled.ids])[0][len(request.ids) - 1 :]
        assert sampled.logprobs == pytest.approx(scores, abs=0.1)


def test_nothing_asked_is_nothing_answered(model: Any) -> None:
    assert engine_of(model).generate([]) == []
    assert engine_of(model).score([]) == []


def test_a_stop_string_ends_a_row_and_is_part_of_it(model: Any, tiny_folder: Path) -> None:
    """Also one that spans tokens, and only where it was sampled: a prompt may hold it."""
    encoder = load_policy(str(tiny_folder)).tokenizer
    engine = Engine(model, eos_ids=frozenset(), context_limit=1024, decode=encoder.decode)
    (free,) = engine.generate(requests(12))
    text = encoder.decode(free.ids[:6])
    for stop in (text[-3:], encoder.decode(free.ids[4:6]), text[-1]):
        first = next(n for n in range(1, 13) if stop in encoder.decode(free.ids[:n]))
        (stopped,) = engine.generate(requests(12, stop=("never sampled by anyone", stop)))
        assert stopped.ids == free.ids[:first]
        assert stopped.logprobs == pytest.approx(free.logprobs[:first], abs=1e-4)
        assert stopped.finish is (Finish.STOP if first < 12 or stop in text else Finish.LENGTH)


def test_stop_strings_without_a_decoder_are_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="stop strings"):
        engine_of(model).generate(requests(12, stop=("x",)))
