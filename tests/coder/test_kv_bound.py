"""`kv_gib` is a bound: no step holds more bytes of keys and values, whatever is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nano_coder.models.local.attention import ROUND
from nano_coder.models.local.engine import Engine, ModuleDecoder, kv_token_bytes
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest
from nano_coder.models.weights import load_policy
from nano_shared.types import Sampling

LONGEST = 400


class LiveKV(TorchDispatchMode):
    """The most bytes that blocks of keys and values of all layers held at once, by their storage."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers, self._tensors, self.peak = layers, [], 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.dim() >= 5]
        self._tensors += [ref(t) for t in new if t.shape[:2] == (self._layers, 2)]
        if new:
            live = [t for one in self._tensors if (t := one()) is not None]
            self._tensors = [ref(t) for t in live]
            storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in live)}
            self.peak = max(self.peak, sum(storages.values()))
        return out


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return load_policy(str(tiny_folder)).model


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(3 + (seed * 131 + 7 * i * (seed + 1)) % 900 for i in range(count))


def ask(ids: tuple[int, ...], owner: int, length: int) -> GenerationRequest:
    return GenerationRequest(ids, Sampling(max_tokens=length), owner, owner)


def finished(engine: Engine, rows: list[DecodingRow], most: list[int]) -> None:
    while any(row.finish is None for row in rows):
        engine.step()
        assert engine.decoder is not None
        most.append(len(engine.decoder.decoding))


def workload(engine: Engine, most: list[int]) -> list[list[int]]:
    """Groups on prompts of many lengths that share a beginning or nothing, rows that join late, three turns,
    a long row, and new owners after it."""
    system = tokens(0, 60)
    prompts = [system + tokens(n, 10 + 37 * n % 90) for n in range(1, 5)] + [tokens(9, 5), tokens(8, 120)]
    rows = engine.add_requests(
        [ask(p, 4 * n + i, 5 + 3 * i) for n, p in enumerate(prompts) for i in range(4)]
    )
    for _ in range(4):
        engine.step()
    late = engine.add_requests([ask(tokens(20 + i, 30 * i + 1), 100 + i, 12) for i in range(5)])
    finished(engine, [*rows, *late], most)
    every = [*rows, *late]
    for turn in range(2):
        rows = [row for i, row in enumerate(rows) if i % 3 != turn]
        rows = engine.add_requests(
            [
                ask((*row.request.ids, *row.ids, *tokens(turn, 20 + 5 * i)), row.request.owner or 0, 6)
                for i, row in enumerate(rows)
            ]
        )
        finished(engine, rows, most)
        every += rows
    long = engine.add_requests([ask(tokens(30, LONGEST - 20), 200, 20)])
    finished(engine, long, most)
    last = engine.add_requests([ask(tokens(40 + i, 25), 300 + i, 9) for i in range(6)])
    finished(engine, last, most)
    return [row.ids for row in [*every, *long, *last]]


def run(model: Any, held: int | None) -> tuple[list[list[int]], float, list[int]]:
    """The tokens, the share of the bound that was live, and the rows of each step; `held` rows of the longest
    length fit."""
    bound = (held or 1000) * (LONGEST + ROUND) * kv_token_bytes(model)
    engine = Engine(model, eos_ids=frozenset(), context_limit=LONGEST, max_batch=16, kv_bytes=bound)
    most: list[int] = []
    with LiveKV(model.config.num_hidden_layers) as live:
        ids = workload(engine, most)
    assert live.peak > 0
    return ids, live.peak / bound, most


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("held", [1, 2, 5, 12])
def test_live_bytes_stay_within_the_bound(model: Any, held: int) -> None:
    """Rows wait for memory and get the tokens that they get with plenty."""
    torch.set_num_threads(1)
    ids, share, most = run(model, held)
    plenty, little, all_at_once = run(model, None)
    assert share <= 1.05
    assert ids == plenty
    assert little < 0.1
    assert max(all_at_once) == 16
    assert max(most) < 16 or held > 2


def held_by(decoder: ModuleDecoder) -> int:
    """Bytes of the storages of all caches."""
    caches = [slot.cache for slot in decoder._slots]
    caches += [cache for _, cache in decoder._retained.values()]
    layers = [layer for cache in caches for layer in cache.layers]
    storages = [t.untyped_storage() for layer in layers for t in (layer.keys, layer.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
@pytest.mark.parametrize("held", [2, 5])
def test_the_caches_of_transformers_stay_within_the_bound(
    model: Any, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model's own forward pass decodes: what it holds after each step."""
    torch.set_num_threads(1)
    plenty = run(model, None)[0]
    bound = held * (LONGEST + ROUND) * kv_token_bytes(model)
    decoder = ModuleDecoder(model, max_batch=16, max_tokens=bound // kv_token_bytes(model))
    monkeypatch.setattr("nano_coder.models.local.engine.choose_decoder", lambda *_, **__: decoder)
    step, most = decoder.step, [0]

    def watched() -> list[DecodingRow]:
        finished = step()
        most.append(held_by(decoder))
        return finished

    monkeypatch.setattr(decoder, "step", watched)
    engine = Engine(model, eos_ids=frozenset(), context_limit=LONGEST, kv_bytes=bound)
    rows: list[int] = []
    ids = workload(engine, rows)
    assert 0.3 * bound < max(most) <= 1.05 * bound
    assert max(rows) > 1
    assert ids == plenty
