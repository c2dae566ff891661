"""What only a GPU can show: the same numbers as on the CPU, in float32, and a bound in bfloat16.

pytest -m gpu tests/rl/test_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from on_fake_device import dpo, sampler, trainer
from test_architectures import fixed_batch
from test_decode_graph import two_turns

from nano_coder.models.local import attention, continuous_batching
from nano_coder.models.local.attention import Scoring
from nano_coder.models.local.engine import Engine
from nano_rl.learn import prefix_tree
from nano_rl.learn.learner import prepare
from nano_rl.learn.logprob import token_logprobs
from nano_rl.learn.prefix_tree import build_tree, tree_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:tree_fallback"),
]


def placed(family: str, device: str, dtype: torch.dtype = torch.float32, lora_rank: int = 0) -> Any:
    return prepare(build(family, dtype).to(device), lora_rank=lora_rank, seed=0)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "mixtral", "lfm2"])
def test_a_gpu_gives_the_numbers_of_the_cpu(family: str, lora_rank: int) -> None:
    for part in (sampler, trainer, dpo):
        here = part(placed(family, "cpu", lora_rank=lora_rank))
        there = part(placed(family, "cuda", lora_rank=lora_rank))
        assert there == pytest.approx(here, rel=1e-3, abs=1e-2)


def test_bfloat16_stays_near_float32() -> None:
    with torch.no_grad():
        exact = token_logprobs(placed("llama", "cuda"), fixed_batch()).cpu()
        near = token_logprobs(placed("llama", "cuda", torch.bfloat16), fixed_batch()).cpu()
    assert (exact - near).abs().mean() < 0.05


def test_checkpointing_saves_memory_of_the_gpu() -> None:
    peaks = []
    for checkpointing in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = build("llama", num_hidden_layers=16).to("cuda")
        trainer(prepare(model, lora_rank=0, seed=0, gradient_checkpointing=checkpointing))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]


def test_flash_attention_over_a_tree_is_that_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ids_BT = torch.tensor(
        [[1, 2, 3, *range(group, group + 90), row, 5] for group in (4, 40) for row in (1, 2, 3)]
    )
    tree = build_tree(ids_BT.to("cuda"), [len(row) for row in ids_BT])

    def attended() -> list[torch.Tensor]:
        torch.manual_seed(0)
        kinds = {"device": "cuda", "dtype": torch.bfloat16}
        given = [torch.randn(n, tree.num_nodes, 64, **kinds).requires_grad_() for n in (6, 2, 2)]  # type: ignore[arg-type]
        out = tree_attention(given[0], given[1], given[2], tree, 0.125)
        return [out, *torch.autograd.grad(out, given, torch.randn(out.shape, **kinds))]  # type: ignore[arg-type]

    fast = attended()
    monkeypatch.setattr(prefix_tree, "has_flash", lambda query: False)
    for one, other in zip(fast, attended(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(40,) * 9, tuple(range(20, 29))])
def test_the_kernel_of_a_decoding_step_is_that_of_blocks(
    dtype: torch.dtype, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 2, n, 64, device="cuda", dtype=dtype) for n in (3, max(lengths), max(lengths)))
    mask = attention._length_mask(lengths, k)
    found = attention.attend(q, k, v, Scoring(scale=0.125), mask)
    monkeypatch.setattr(attention, "_PARALLEL", 1000)
    for one, other in zip(found, attention.attend(q, k, v, Scoring(scale=0.125), mask), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_recorded_step_samples_as_a_launched_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family).to("cuda")
    recorded = two_turns(Engine(model, eos_ids=frozenset(), context_limit=200))
    monkeypatch.setattr(continuous_batching, "can_record", lambda forward: False)
    launched = two_turns(Engine(model, eos_ids=frozenset(), context_limit=200))
    assert [row.ids for row in recorded] == [row.ids for row in launched]
    for one, other in zip(recorded, launched, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
