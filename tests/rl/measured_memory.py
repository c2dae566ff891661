"""A training step with random weights in a process of its own, and its peak beside what the plan says.

    python tests/rl/measured_memory.py SHAPE LORA_RANK DTYPE TOKENS CHECKPOINTING

Prints {"predicted": bytes, "measured": bytes, "process": bytes before the model}.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nano_plan.memory import Workload, plan_memory
from nano_rl.learn.batch import make_batches
from nano_rl.learn.config import UpdateConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.learner import Learner, prepare
from nano_rl.learn.logprob import token_logprobs

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024,
    },
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    },
}  # fmt: skip


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(shape: str, lora_rank: int, dtype: Any, tokens: int, checkpointing: bool) -> None:
    torch.set_num_threads(1)
    architecture = LlamaConfig(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=8192)
    config = UpdateConfig(
        lora_rank=lora_rank, dtype=dtype, max_tokens=tokens, gradient_checkpointing=checkpointing
    )

    def build(kind: torch.dtype) -> Any:
        return LlamaForCausalLM._from_config(architecture, dtype=kind)

    def likelihood(model: Any, batch: Any) -> Any:
        return -token_logprobs(model, batch).sum(), {"tokens": 1.0}

    work = Workload(rows=0, row_tokens=tokens, kv_bytes=0)
    predicted = plan_memory(build, config, work, torch.device("cpu"))
    import peft  # noqa: F401

    ids = tuple(3 + 7 * n % 900 for n in range(tokens))
    mask = (0,) * (tokens // 2) + (1,) * (tokens - tokens // 2)
    row = TrainSample(
        run_id="a", ids=ids, mask=mask, logprobs=tuple(-1.0 * m for m in mask), versions=(0,) * tokens,
        advantage=1.0, temperature=1.0,
    )  # fmt: skip
    before = peak()
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = prepare(build(kind).eval(), lora_rank=lora_rank, seed=0, gradient_checkpointing=checkpointing)
    learner = Learner(model, config.optimizer, steps=2)
    for _ in range(2):
        learner.update(make_batches([row], max_tokens=tokens), likelihood, lambda metrics: None)
    parts = {name: size for name, size in predicted.parts.items() if name != "sampler's copy"}
    print(
        json.dumps({"predicted": sum(parts.values()), "measured": peak(), "process": before, "parts": parts})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5] == "1")
