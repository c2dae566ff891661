"""Peak memory of each rank (FSDP2, CPU) over two updates of 135 million random weights, beside `plan`.

    torchrun --nproc-per-node 2 benchmarks/rank_memory.py LORA_RANK DTYPE TOKENS

Rank 0, which has a whole copy of the weights besides, prints {"planned": [bytes of rank 0, of each other],
"measured": [bytes of each rank]}.
"""

from __future__ import annotations

import copy
import json
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from nano_cluster.learner import ShardedLearner
from nano_cluster.ranks import LEAVE, Ranks
from nano_plan.memory import Workload, plan_memory
from nano_rl.learn.batch import make_batches
from nano_rl.learn.config import UpdateConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.learner import prepare
from nano_rl.learn.train_step import PolicyLoss

SHAPE: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip


def main(lora_rank: int, dtype: Any, tokens: int) -> None:
    torch.set_num_threads(1)
    architecture = LlamaConfig(**SHAPE)
    config = UpdateConfig(lora_rank=lora_rank, dtype=dtype, max_tokens=tokens)

    def build(kind: torch.dtype) -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM._from_config(architecture, dtype=kind)

    ranks = Ranks.connect()
    ranks.join("cpu")
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = prepare(build(kind).eval(), lora_rank=lora_rank, seed=0)
    whole = copy.deepcopy(model) if ranks.rank == 0 else None
    ids = tuple(3 + 7 * n % 900 for n in range(tokens))
    mask = (0,) * (tokens // 2) + (1,) * (tokens - tokens // 2)
    rows = [
        TrainSample(
            run_id=str(number), ids=(number, *ids[1:]), mask=mask, logprobs=tuple(-1.0 * m for m in mask),
            versions=(0,) * tokens, advantage=1.0, temperature=1.0,
        )
        for number in range(2)
    ]  # fmt: skip
    with TemporaryDirectory() as folder:
        learner = ShardedLearner(ranks, model, config.optimizer, steps=2, shards=Path(folder), whole=whole)
        del model, whole
        if ranks.rank:
            for order, told in ranks.orders():
                learner.follow(order, told)
        else:
            loss = PolicyLoss(objective=config.objective.terms)
            for _ in range(2):
                batches = make_batches(rows, max_tokens=tokens)
                learner.update_parts([(batch, loss) for batch in batches], lambda metrics: None)
            ranks.order(LEAVE)
    peaks: list[Any] = [None] * ranks.size
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if ranks.rank == 0:
        work = Workload(rows=0, row_tokens=tokens, kv_bytes=0)
        plan = plan_memory(build, config, work, torch.device("cpu"), ranks=ranks.size)
        of_first = plan.total - plan.parts["sampler's copy"]  # nothing is sampled here
        print(json.dumps({"planned": [of_first, plan.other_rank], "measured": peaks}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
