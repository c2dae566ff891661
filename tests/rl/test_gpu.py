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

from nano_rl.learn.model.learner import prepare
from nano_rl.learn.model.logprob import token_logprobs

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
