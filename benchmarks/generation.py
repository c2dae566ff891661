"""The engine against `generate` of transformers, in one run that alternates them; nothing is extrapolated.

    python benchmarks/generation.py [--case smol|tiny|turns|step|long] [--rounds N] [--shrink K]

smol   SmolLM2-135M, bfloat16, 4 prompts x 8 rows, P=256, C=64: tokens a second of both
tiny   random Llama of 2.66 M parameters, float32, 8 x 8, P=256, C=128: the same
turns  the tiny one, 8 x 8, three turns of 64 with observations of 62 tokens: KV kept between turns, rows read
       anew at each turn, and `generate` on the whole row
step   SmolLM2-135M, bfloat16, 32 rows: a decoding step against its matrix products, measured in turn
long   SmolLM2-135M, bfloat16, one row: a decoding step behind prompts of 64 to 4,096 tokens, measured in turn

Lengths are forced, temperature 1, no top-k. Each side's peak memory is that of a process of its own, which
runs the case once. `--shrink` divides all lengths, for a look at whether it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from peak_memory import peak_kb
from torch.nn import functional as F

from nano_coder.models.local.continuous_batching import ContinuousDecoder
from nano_coder.models.local.engine import Engine
from nano_coder.models.local.sampler import GenerationRequest
from nano_coder.models.weights import load_policy, quiet_transformers
from nano_shared.types import Sampling

OBSERVATION = 62


@dataclass(frozen=True)
class Case:
    model: Callable[[], Any]
    prompts: int
    group: int
    prompt: int
    """tokens of a prompt"""
    completion: int
    """tokens sampled a turn"""
    turns: int = 1


def smollm() -> Any:
    return load_policy(dtype="bfloat16").model


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1536, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


CASES = {
    "smol": Case(smollm, prompts=4, group=8, prompt=256, completion=64),
    "tiny": Case(tiny, prompts=8, group=8, prompt=256, completion=128),
    "turns": Case(tiny, prompts=8, group=8, prompt=256, completion=64, turns=3),
}


class Work:
    """One case on one model: each method is a whole run of it, and returns its seconds."""

    def __init__(self, case: Case, shrink: int) -> None:
        self.case = case
        self.model = case.model()
        self.prompt, self.completion = case.prompt // shrink, case.completion // shrink
        self.rows = case.prompts * case.group
        self.seed = 0
        self.reads: list[int] = []

    def ours(self, *, keep: bool = True) -> float:
        """A new engine each time, as at each training step."""
        started = time.perf_counter()
        engine = Engine(self.model, eos_ids=frozenset(), context_limit=1024)
        rows = self.fresh()
        for turn in range(self.case.turns):
            requests = [
                GenerationRequest(
                    tuple(ids), Sampling(max_tokens=self.completion), self.seed + i, owner=i if keep else None
                )
                for i, ids in enumerate(rows)
            ]
            sampled = engine.generate(requests)
            rows = [[*ids, *s.ids, *self.observed(turn)] for ids, s in zip(rows, sampled, strict=True)]
        assert isinstance(engine.decoder, ContinuousDecoder)
        self.reads.append(engine.decoder.counts.prefilled)
        return time.perf_counter() - started

    def read_anew(self) -> float:
        return self.ours(keep=False)

    def transformers(self) -> float:
        started = time.perf_counter()
        ids = torch.tensor(self.fresh())
        for turn in range(self.case.turns):
            with quiet_transformers(), torch.no_grad():
                ids = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                    max_new_tokens=self.completion, min_new_tokens=self.completion, eos_token_id=None,
                    pad_token_id=0,
                )  # fmt: skip
            ids = torch.cat([ids, torch.tensor([self.observed(turn)] * self.rows)], dim=1)
        return time.perf_counter() - started

    def fresh(self) -> list[list[int]]:
        """[prompts * group] prompts, others at each run, so that nothing is warm but the weights."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.case.prompts, self.prompt)
        drawn = torch.randint(5, self.model.config.vocab_size, size, generator=generator)
        return [row for row in drawn.tolist() for _ in range(self.case.group)]

    def observed(self, turn: int) -> list[int]:
        return [5 + (7 * turn + i) % 900 for i in range(OBSERVATION)]


def run_case(name: str, rounds: int, shrink: int) -> None:
    work = Work(CASES[name], shrink)
    sides = {"ours": work.ours, "transformers": work.transformers}
    if work.case.turns > 1:
        sides["read anew"] = work.read_anew
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for lap in range(rounds + 1):
        for side, run in sides.items():
            took = run()
            if lap:  # the first warms up
                seconds[side].append(took)
    tokens = work.rows * work.completion * work.case.turns
    for side, laps in seconds.items():
        middle = median(laps)
        print(
            f"{name:6} {side:12} {middle:7.2f} s ({min(laps):.2f} to {max(laps):.2f}),"
            f" {tokens / middle:7.1f} tokens/s, {middle / median(seconds['ours']):5.2f} x ours,"
            f" peak {peak_of(name, side, shrink):.2f} GB"
        )
    print(f"{name:6} prompt and observation tokens read by ours: {sorted(set(work.reads))}", flush=True)


def peak_of(name: str, side: str, shrink: int) -> float:
    """GB of a process that runs this side once."""
    command = [sys.executable, __file__, "--case", name, "--peak", side, "--shrink", str(shrink)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak"])


def print_peak(name: str, side: str, shrink: int) -> None:
    work = Work(CASES[name], shrink)
    {"ours": work.ours, "transformers": work.transformers, "read anew": work.read_anew}[side]()
    print(json.dumps({"peak": peak_kb() / 1e6}))


def run_step(rounds: int, shrink: int) -> None:
    """A step of 32 rows behind their prompts against the linear layers of the same step, step by step."""
    work = Work(CASES["smol"], shrink)
    engine = Engine(work.model, eos_ids=frozenset(), context_limit=1024)
    steps, products = [], []
    for _ in range(rounds):
        engine.add_requests(
            [
                GenerationRequest(tuple(ids), Sampling(max_tokens=work.completion), i)
                for i, ids in enumerate(work.fresh())
            ]
        )
        engine.step()  # reads the prompts
        while engine.busy:
            started = time.perf_counter()
            engine.step()
            between = time.perf_counter()
            multiply(work.model, work.rows)
            steps.append(between - started)
            products.append(time.perf_counter() - between)
    ratio = median(a / b for a, b in zip(steps, products, strict=True))
    print(
        f"step   {work.rows} rows: {1000 * median(steps):.1f} ms (best {1000 * min(steps):.1f}), its matrix"
        f" products {1000 * median(products):.1f} ms (best {1000 * min(products):.1f}),"
        f" median ratio {ratio:.2f}"
    )


def run_long(rounds: int, shrink: int) -> None:
    """A step of one row by the tokens before it: what a long completion costs a token as it grows."""
    model = smollm()
    engine = Engine(model, eos_ids=frozenset(), context_limit=8192)
    steps: dict[int, list[float]] = {}
    for lap in range(rounds):
        for tokens in (64, 1024, 4096):
            generator = torch.Generator().manual_seed(lap)
            ids = torch.randint(5, model.config.vocab_size, (tokens // shrink,), generator=generator)
            engine.add_requests([GenerationRequest(tuple(ids.tolist()), Sampling(max_tokens=32), lap)])
            engine.step()  # reads the prompt
            while engine.busy:
                started = time.perf_counter()
                engine.step()
                steps.setdefault(tokens // shrink, []).append(time.perf_counter() - started)
    least = median(next(iter(steps.values())))
    for tokens, laps in steps.items():
        middle = median(laps)
        print(f"long   behind {tokens:5} tokens: {1000 * middle:.1f} ms a token, {middle / least:.2f} x")


def multiply(model: Any, rows: int) -> None:
    """The linear layers of one step and nothing else, on inputs that were just there."""
    config = model.config
    hidden = torch.ones((rows, config.hidden_size), dtype=model.dtype)
    wide = torch.ones((rows, config.intermediate_size), dtype=model.dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for module in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                F.linear(hidden, module.weight)
            F.linear(hidden, mlp.gate_proj.weight)
            F.linear(hidden, mlp.up_proj.weight)
            F.linear(wide, mlp.down_proj.weight)
        F.linear(hidden, model.lm_head.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "step", "long"], help="default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.case, options.peak, options.shrink)
        return
    runs = {"step": run_step, "long": run_long}
    for name in [options.case] if options.case else [*CASES, *runs]:
        if name in runs:
            runs[name](options.rounds, options.shrink)
        else:
            run_case(name, options.rounds, options.shrink)


if __name__ == "__main__":
    main()
