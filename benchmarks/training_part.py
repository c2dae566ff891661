"""The training part of a step alone: forward, backward, optimizer; token trees against independent rows.

    python benchmarks/training_part.py smollm2-bf16            # also smollm2-fp32, smollm2-lora, tiny, multi
    python benchmarks/training_part.py tiny --ragged           # lengths between a quarter and the whole
    python benchmarks/training_part.py tiny --memory           # peak memory, each side in its own process
    python benchmarks/training_part.py tiny --curve group      # also turns, prompt: cost against size

Both sides do the same work in one run, alternating; figures are medians after the warm-up. `share` is the
arithmetic that is needed (2 FLOP a weight and token, forward and both gradients; attention not counted) at
the matmul rate measured in the same run, as a share of the time taken. Random rows: nothing is learned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from peak_memory import peak_kb
from torch import nn

from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.learner import Learner, prepare
from nano_rl.learn.logprob import can_share, independent_rows
from nano_rl.learn.objectives import RECIPE
from nano_rl.learn.prefix_tree import build_tree
from nano_rl.learn.train_step import PolicyLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    model: str = "tiny"
    dtype: str = "float32"
    lora_rank: int = 0
    prompts: int = 8
    rollouts: int = 8
    prompt_tokens: int = 256
    turn_tokens: int = 128
    turns: int = 1
    observation_tokens: int = 62
    budget: int = 4096
    ragged: bool = False


SMOL = Work(model="smollm2", prompts=4, turn_tokens=64)
CASES = {
    "smollm2-bf16": replace(SMOL, dtype="bfloat16"),
    "smollm2-fp32": replace(SMOL, budget=2048),
    "smollm2-lora": replace(SMOL, dtype="bfloat16", lora_rank=16),
    "tiny": Work(budget=16384),
    "multi": Work(turns=3, turn_tokens=64, budget=16384),
}
CURVES = {
    "group": [("rollouts", n) for n in (2, 4, 8, 16, 32)],
    "turns": [("turns", n) for n in (1, 2, 4, 8)],
    "prompt": [("prompt_tokens", n) for n in (64, 128, 256, 512, 1024)],
}


def load(work: Work) -> nn.Module:
    if work.model == "smollm2":
        from nano_coder.models.opening import open_weights
        from nano_coder.models.weights import BASE

        model = open_weights(BASE, dtype=work.dtype).loaded.model
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1536, hidden_size=192, intermediate_size=512, num_hidden_layers=6, head_dim=32,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(getattr(torch, work.dtype))
    return prepare(model, lora_rank=work.lora_rank, seed=0)


def rows(work: Work, vocabulary: int) -> list[TrainSample]:
    random = Random(0)

    def text(length: int) -> list[int]:
        return [random.randrange(3, vocabulary) for _ in range(length)]

    def sampled() -> int:
        return random.randint(work.turn_tokens // 4, work.turn_tokens) if work.ragged else work.turn_tokens

    samples = []
    for prompt in range(work.prompts):
        trunk = text(work.prompt_tokens)
        for rollout in range(work.rollouts):
            ids, mask = list(trunk), [0] * len(trunk)
            turns = random.randint(1, work.turns) if work.ragged else work.turns
            for turn in range(turns):
                length = sampled()
                ids, mask = ids + text(length), mask + [1] * length
                if turn < turns - 1:
                    ids += text(work.observation_tokens)
                    mask += [0] * work.observation_tokens
            samples.append(
                TrainSample(
                    run_id=f"{prompt}-{rollout}", ids=tuple(ids), mask=tuple(mask),
                    logprobs=tuple(-1.0 * m for m in mask), versions=(0,) * len(ids),
                    advantage=random.uniform(-1, 1), temperature=1.0,
                )
            )  # fmt: skip
    return samples


class Side:
    """One way of doing the step: `tree` or `rows`."""

    def __init__(self, name: str, work: Work, learner: Learner, samples: list[TrainSample]) -> None:
        self.name, self._model, self._learner = name, learner.model, learner
        self._batches = make_batches(samples, max_tokens=work.budget, trees=name == "tree")
        self.tokens = sum(map(_nodes, self._batches))
        self.positions = self.tokens if name == "tree" else sum(b.ids_BT.numel() for b in self._batches)
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def step(self) -> None:
        started, cpu = time.perf_counter(), time.process_time()
        if self.name == "tree":
            self._learner.update(self._batches, _objective, lambda metrics: None)
        else:
            base: Any = self._model
            with independent_rows(base.get_base_model() if hasattr(base, "get_base_model") else base):
                self._learner.update(self._batches, _objective, lambda metrics: None)
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(time.process_time() - cpu)


def _objective(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    return PolicyLoss(objective=RECIPE.with_terms(tis_cap=None))(model, batch)


def _nodes(batch: Batch) -> int:
    return build_tree(batch.ids_BT, batch.attention_BT.sum(1).tolist()).num_nodes


def matmul_rate(model: nn.Module, tokens: int) -> float:
    """FLOP a second of this model's widest projection over that many tokens; one sample."""
    weight = max((p for n, p in model.named_parameters() if "up_proj" in n), key=nn.Parameter.numel)
    x = torch.randn(tokens, weight.shape[1]).to(weight.dtype)
    with torch.no_grad():
        started = time.perf_counter()
        for _ in range(5):
            nn.functional.linear(x, weight)
        return 2 * tokens * weight.numel() * 5 / (time.perf_counter() - started)


def needed_flop(model: nn.Module, tokens: int, predicted: int) -> float:
    base = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "lora_" not in n}
    embedding = next(p for n, p in base.items() if "embed_tokens" in n)
    backbone = sum(p.numel() for n, p in base.items() if "embed_tokens" not in n and "lm_head" not in n)
    products = 3 if any(p.requires_grad for p in base.values()) else 2
    return 2.0 * products * (backbone * tokens + embedding.numel() * predicted)


def measure(work: Work, sides: list[str], steps: int, warmup: int) -> dict[str, Any]:
    model = load(work)
    assert can_share(model)
    config: Any = model.config
    samples = rows(work, config.vocab_size)
    learner = Learner(model, OptimizerConfig(learning_rate=1e-6), steps=1000)
    runs = [Side(name, work, learner, samples) for name in sides]
    predicted = sum(sum(s.mask) for s in samples)
    rates = []
    for step in range(warmup + steps):
        if step == warmup:
            for side in runs:
                side.seconds.clear()
                side.cpu.clear()
        for side in runs if step % 2 else runs[::-1]:
            side.step()
        rates.append(matmul_rate(model, min(runs[0].tokens, work.budget)))
    rate = statistics.median(rates[warmup:])
    found: dict[str, Any] = {
        "matmul_gflops": round(rate / 1e9, 1),
        "peak_rss_gb": round(peak_kb() / 2**20, 2),
        "tokens_trained": predicted,
    }
    for side in runs:
        seconds = statistics.median(side.seconds)
        flop = needed_flop(model, runs[0].tokens, predicted)
        found[side.name] = {
            "seconds": round(seconds, 3),
            "min": round(min(side.seconds), 3),
            "max": round(max(side.seconds), 3),
            "cpu_seconds": round(statistics.median(side.cpu), 3),
            "tokens_forwarded": side.positions,
            "gflops_needed": round(flop / seconds / 1e9, 1),
            "share": round(flop / rate / seconds, 3),
        }
    if len(runs) == 2:
        pairs = zip(*(side.seconds for side in runs), strict=True)
        found["ratio"] = round(statistics.median(second / first for first, second in pairs), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, help="positions of a micro-batch")
    parser.add_argument("--sides", default="tree,rows")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--curve", choices=CURVES)
    parser.add_argument("--prompts", type=int, help="with --curve: groups of a step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = replace(CASES[args.case], ragged=args.ragged)
    if args.budget:
        work = replace(work, budget=args.budget)
    if args.memory:
        for side in args.sides.split(","):
            rest = [a for a in sys.argv[1:] if a != "--memory"]
            child = [sys.executable, __file__, *rest, "--sides", side, "--steps", "1", "--warmup", "1"]
            done = subprocess.run(child, check=True, capture_output=True, text=True)
            print(json.dumps({"side": side, "peak_rss_gb": json.loads(done.stdout)["peak_rss_gb"]}))
        return
    if args.curve:
        work = replace(work, prompts=args.prompts or work.prompts)
        for name, value in CURVES[args.curve]:
            found = measure(replace(work, **{name: value}), ["tree"], args.steps, args.warmup)
            tree, new = found["tree"], found["tokens_trained"]
            # CPU time: other programs on the machine stretch the wall clock, not this
            each = {"new": new, "forwarded": tree["tokens_forwarded"]}
            costs = {
                f"us_a_{kind}_token": round(1e6 * tree["cpu_seconds"] / n, 1) for kind, n in each.items()
            }
            print(json.dumps({name: value, "new_tokens": new, **tree, **costs}), flush=True)
        return
    print(json.dumps({"case": args.case, **measure(work, args.sides.split(","), args.steps, args.warmup)}))


if __name__ == "__main__":
    main()
