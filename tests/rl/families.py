"""Tiny models of several families, and rows that fork, for tests of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from builders import VOCABULARY, exact
from hypothesis import strategies as st

from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.groups import TrainSample

FAMILIES = ("llama", "llama-mha-untied", "qwen2", "qwen3")


def family(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> torch.nn.Module:
    """A model of a few thousand weights, the same at every call; four heads over two key heads, tied."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "llama-mha-untied": (
            LlamaConfig,
            LlamaForCausalLM,
            {"num_key_value_heads": 4, "tie_word_embeddings": False},
        ),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    }
    config_class, model_class, own = kinds[name]
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.3, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    return exact(model_class(config_class(**{**shape, **own, **settings})).to(dtype).eval())


def adapted(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """The model under a LoRA adapter whose effect is not nil."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = {"target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    config = LoraConfig(r=2, init_lora_weights=False, **targets)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def sample(ids: Sequence[int], mask: Sequence[int], run: int, temperature: float = 1.0) -> TrainSample:
    return TrainSample(
        run_id=f"run-{run}", ids=tuple(ids), mask=tuple(mask),
        logprobs=tuple(-1.0 * m for m in mask), versions=(0,) * len(ids),
        advantage=1.5 - run, temperature=temperature,
    )  # fmt: skip


@st.composite
def forking_rows(draw: st.DrawFn) -> list[TrainSample]:
    """Rows that share prefixes of any depth, sampled tokens too, with masks of several turns."""
    tokens = st.integers(0, 3)
    trunk = draw(st.lists(tokens, min_size=1, max_size=6))
    samples: list[TrainSample] = []
    for run in range(draw(st.integers(1, 5))):
        stem = draw(st.sampled_from([trunk, *[list(s.ids) for s in samples]]))
        ids = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(tokens, max_size=6))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        samples.append(sample(ids, mask, run, draw(st.sampled_from([1.0, 0.6]))))
    return samples


def one_batch(samples: Sequence[TrainSample], dtype: torch.dtype = torch.float64) -> Batch:
    (batch,) = make_batches(samples, max_tokens=10_000, dtype=dtype)
    return batch
