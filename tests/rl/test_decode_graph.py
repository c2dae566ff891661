"""Recorded decoding steps, replayed by computing them again: what CUDA's graphs do, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from architectures import build
from torch import Tensor

from nano_coder.models.local import continuous_batching, decode_graph
from nano_coder.models.local.engine import Engine
from nano_coder.models.local.sampler import GenerationRequest, Sampled
from nano_shared.types import Sampling


def computed_again(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """As `decode_graph.record`, without a graph."""
    result = run()

    def again() -> None:
        result.copy_(run())

    return result, again


class Recorded:
    """Counts recordings and replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded = self.replayed = 0
        monkeypatch.setattr(continuous_batching, "can_record", lambda forward: forward.fixed_shapes)
        monkeypatch.setattr(decode_graph, "record", self.record)

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.recorded += 1
        result, again = computed_again(run)

        def replay() -> None:
            self.replayed += 1
            again()

        return result, replay


def two_turns(engine: Engine) -> list[Sampled]:
    """Rows of three prompts that end at different places, then a second turn of each."""
    rows = [
        GenerationRequest(
            tuple(range(3 + n % 3, 24)), Sampling(max_tokens=2 + 3 * n, temperature=1.0), seed=n, owner=n
        )
        for n in range(11)
    ]
    first = engine.generate(rows)
    later = [
        GenerationRequest((*row.ids, *said.ids, 9, 8), Sampling(max_tokens=40), row.seed, row.owner)
        for row, said in zip(rows, first, strict=True)
    ]
    return [*first, *engine.generate(later)]


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "granite", "cohere"])
def test_recorded_steps_sample_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled() -> list[Sampled]:
        return two_turns(Engine(build(family), eos_ids=frozenset(), context_limit=200))

    plain = sampled()
    recorded = Recorded(monkeypatch)
    again = sampled()
    assert [row.ids for row in again] == [row.ids for row in plain]
    for one, other in zip(plain, again, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert recorded.replayed > 5 * recorded.recorded > 0


def test_a_step_is_recorded_when_its_blocks_of_cache_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    engine = Engine(build("llama"), eos_ids=frozenset(), context_limit=400)
    request = GenerationRequest(tuple(range(3, 24)), Sampling(max_tokens=100), seed=0)
    engine.generate([request])
    assert recorded.recorded == 1
    # the first token comes from prefill, the second from a step that has not come before
    assert recorded.replayed >= 98
