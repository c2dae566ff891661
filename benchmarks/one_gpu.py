"""Rollout and training on one GPU: tokens a second, MFU, peak memory against the plan, beside TRL.

    python benchmarks/one_gpu.py --out FILE [--only NAME ...] [--trl-python PYTHON] [--micro-batch TOKENS]

Random weights in the shapes of SmolLM2-135M, Qwen2.5-1.5B and Llama-3-8B, in bfloat16. Each case is a process
of its own, and one JSON line of FILE:

step-*   a GRPO step as `grpo_step.py` makes it: 8 prompts x 8 rollouts, prompts of 256 tokens, 256 sampled;
         the 8B shape trains an adapter, the others all weights
one-*    one rollout alone: seconds a sampled token
long-*   one update on two long rows with gradient checkpointing
trl-*    the step by TRL, unmodified, where `--trl-python` names a Python that has it

`--micro-batch` bounds the tokens of a micro-batch of both: TRL's has as many rows as hold them.

Peak memory is what PyTorch's allocator handed out; the plan is what `nano-rl plan` says, without its estimate
for the process. `--at-once` runs the cases side by side, to see that each works: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from grpo_step_case import Case

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "1.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
        "tie_word_embeddings": True, "max_position_embeddings": 65536,
    },
    "8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "tie_word_embeddings": False, "max_position_embeddings": 65536,
    },
}  # fmt: skip
LORA = {"8b": 16}
"""rank of the adapter; other shapes train all weights"""
LONG = {"135m": 8192, "1.5b": 32768, "8b": 8192}
"""tokens of a long row"""
NAMES = [f"{kind}-{shape}" for shape in SHAPES for kind in ("step", "one", "long", "trl")]
STEPS = 3
"""measured, after one that is not"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Rollout and training on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--trl-python", help="a Python that has torch, trl and peft")
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens, of ours and of TRL's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, for a look on a CPU")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--case", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print("FIGURES " + json.dumps(run_case(options)), flush=True)
        return 0
    running: list[tuple[str, subprocess.Popen[str]]] = []
    failed = 0
    for name in options.only:
        if name.startswith("trl-") and not options.trl_python:
            continue
        python = options.trl_python if name.startswith("trl-") else sys.executable
        command = [python, __file__, "--out", "-", "--device", options.device]
        command += ["--case", name, "--shrink", str(options.shrink)]
        command += ["--micro-batch", str(options.micro_batch)]
        running.append(
            (name, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        )
        if not options.at_once:
            failed += written(options.out, *running.pop())
    return int(any([failed, *[written(options.out, *one) for one in running]]))


def written(out: Path, name: str, process: subprocess.Popen[str]) -> int:
    """Append what the case found, or the end of what it printed; 1 if it failed."""
    printed = process.communicate()[0]
    lines = [line for line in printed.splitlines() if line.startswith("FIGURES ")]
    found: dict[str, Any] = {"failed": printed[-2500:]}
    if lines and not process.returncode:
        found = json.loads(lines[-1].removeprefix("FIGURES "))
    line = json.dumps({"case": name, **found})
    print(line.replace("\\n", "\n"), flush=True)
    with out.open("a") as file:
        file.write(line + "\n")
    return int("failed" in found)


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    name, device, shrink = options.case, options.device, options.shrink
    kind, shape = name.split("-")
    torch.manual_seed(0)
    case = Case(
        name=name, model="smollm2", prompts=8, rollouts=8, prompt_tokens=max(64, 256 // shrink),
        new_tokens=256 // shrink, dtype="bfloat16", lora_rank=LORA.get(shape, 0), device=device,
        max_tokens=options.micro_batch // shrink, peer_micro=max(1, options.micro_batch // 512),
    )  # fmt: skip
    if kind == "trl":
        return trl_step(case, shape)
    model = random_model(shape, device)
    if kind == "long":
        return long_row(model, shape, LONG[shape] // shrink)
    if kind == "one":
        return one_row(model, shape, case)
    return steps(model, shape, case)


def random_model(shape: str, device: str) -> Any:
    import torch
    from transformers import AutoConfig

    from nano_coder.models.weights import build_empty

    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device(device):
        return build_empty(config, torch.bfloat16).eval()


def tokenizer() -> Any:
    """Of words; the ids that a random model samples beyond them are no text."""
    from transformers import AutoTokenizer

    from integration.tiny_model import build_tiny

    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(build_tiny(Path(folder) / "tiny", texts, vocab_size=1536))


def steps(model: Any, shape: str, case: Case) -> dict[str, Any]:
    from grpo_step_nano import Steps

    made = Steps(model, tokenizer(), case)
    found = [made() for _ in range(1 + STEPS)][1:]
    rolled = median(row["rollout"] for row in found)
    trained = median(row["train"] for row in found)
    planned = memory_plan(shape, made.config, case, rows=case.prompts * case.rollouts)
    return {
        "micro-batch": case.max_tokens, "rollout seconds": rolled,
        "sampled tokens/s": found[0]["generated"] / rolled,
        "training seconds": trained, "trained tokens/s": found[0]["trained"] / trained,
        "mfu": median(row["flops"] for row in found) / trained / bf16_flops(case.device),
        "mismatch mean, max": [max(row[k] for row in found) for k in ("mismatch", "mismatch_max")],
        **memory(planned),
    }  # fmt: skip


def one_row(model: Any, shape: str, case: Case) -> dict[str, Any]:
    from nano_coder.models.local.engine import Engine
    from nano_coder.models.local.sampler import GenerationRequest
    from nano_shared.types import Sampling

    engine = Engine(model, eos_ids=frozenset(), context_limit=4096)
    vocabulary, tokens = SHAPES[shape]["vocab_size"], case.new_tokens
    seconds = []
    for seed in range(1 + STEPS):
        prompt = tuple(997 * (seed + 1) * n % vocabulary for n in range(case.prompt_tokens))
        began = time.perf_counter()
        engine.generate([GenerationRequest(prompt, Sampling(temperature=1.0, max_tokens=tokens), seed)])
        seconds.append(time.perf_counter() - began)
    return {"sampled tokens/s": tokens / median(seconds[1:])}


def long_row(model: Any, shape: str, tokens: int) -> dict[str, Any]:
    import torch

    from nano_rl.config import TrainConfig
    from nano_rl.learn.batch import make_batches
    from nano_rl.learn.config import OptimizerConfig
    from nano_rl.learn.groups import TrainSample
    from nano_rl.learn.learner import Learner, prepare
    from nano_rl.learn.logprob import can_share
    from nano_rl.learn.train_step import PolicyLoss

    config = TrainConfig(
        dtype="bfloat16", lora_rank=LORA.get(shape, 0), gradient_checkpointing=True, max_tokens=tokens,
        optimizer=OptimizerConfig(learning_rate=1e-6),
    )  # fmt: skip
    model = prepare(model, lora_rank=config.lora_rank, seed=1, gradient_checkpointing=True)
    learner = Learner(model, config.optimizer, steps=100)
    prompt, vocabulary = min(256, tokens // 4), SHAPES[shape]["vocab_size"]
    mask = (0,) * prompt + (1,) * (tokens - prompt)
    samples = [
        TrainSample(
            run_id=f"run-{n}", ids=tuple(torch.randint(vocabulary, (tokens,)).tolist()), mask=mask,
            logprobs=tuple(-11.0 * m for m in mask), versions=(0,) * tokens, advantage=1.0 - 2 * n,
            temperature=1.0,
        )
        for n in range(2)
    ]  # fmt: skip
    batches = make_batches(samples, max_tokens=tokens, trees=can_share(model))
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        learner.update(batches, PolicyLoss(objective=config.objective.terms), lambda metrics: None)
        seconds.append(time.perf_counter() - began)
    case = Case(name="", model="smollm2", prompts=1, rollouts=1, new_tokens=0, prompt_tokens=tokens,
                device=str(next(model.parameters()).device))  # fmt: skip
    planned = memory_plan(shape, config, case, rows=0)
    return {"row tokens": tokens, "trained tokens/s": 2 * tokens / median(seconds[1:]), **memory(planned)}


def memory_plan(shape: str, config: Any, case: Case, *, rows: int) -> dict[str, float]:
    """Parts in GiB; without rows that are sampled none of the sampler."""
    import torch
    from transformers import AutoConfig

    from nano_coder.models.local.engine import kv_bound
    from nano_coder.models.weights import build_empty
    from nano_plan.memory import Workload, plan_memory

    architecture = AutoConfig.for_model(**SHAPES[shape])
    work = Workload(
        rows=rows,
        row_tokens=case.prompt_tokens + case.new_tokens,
        kv_bytes=kv_bound(torch.device(case.device)),
    )
    plan = plan_memory(
        lambda dtype: build_empty(architecture, dtype), config, work, torch.device(case.device)
    )
    left_out = ("process",) if rows else ("process", "sampler's copy", "used in turn")
    return {name: size / 2**30 for name, size in plan.parts.items() if size and name not in left_out}


def memory(planned: dict[str, float]) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"planned GiB": sum(planned.values()), "parts": planned}
    peak, reserved = (n() / 2**30 for n in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    return {
        "peak GiB": peak, "reserved GiB": reserved, "planned GiB": sum(planned.values()),
        "planned/peak": sum(planned.values()) / peak, "parts": planned,
    }  # fmt: skip


def bf16_flops(device: str) -> float:
    import torch

    from nano_rl.learn.utilisation import measured_flops

    return measured_flops(torch.device(device), torch.bfloat16)


def trl_step(case: Case, shape: str) -> dict[str, Any]:
    """Figures of the same step by TRL, which runs in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    random_model(shape, case.device).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    script = Path(__file__).with_name("grpo_step_trl.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), case.to_json()], input="step\n" * (1 + STEPS),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")][1:]
    if not rows:
        raise SystemExit(done.stderr[-2500:])
    rolled, seconds = (median(row[key] for row in rows) for key in ("rollout", "seconds"))
    return {
        "micro-batch": case.max_tokens, "rollout seconds": rolled,
        "sampled tokens/s": rows[0]["generated"] / rolled,
        "training seconds": seconds - rolled, "peak GiB": rows[-1]["gpu_gb"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
