"""How far from the floor of this machine decoding and reading a prompt are.

    python benchmarks/floor.py [--model coder-1.5b] [--rows 1 8] [--rounds 5] [--write]

The floor of a decoding step is the time in which all weights but the embedding can be read once; that of a
prompt, the time of 2 operations a weight and token at the rate of a large matrix product, and of the head on
its last position. Both rates are measured in turn with the engine, in the same rounds; medians. --write
leaves them in docs/results/floor.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nano_coder.models.local.engine import Engine
from nano_coder.models.local.sampler import GenerationRequest
from nano_coder.models.opening import open_weights
from nano_shared.types import Sampling

RESULT = Path(__file__).parents[1] / "docs" / "results" / "floor.json"
PROMPT, STEPS = 512, 32
BAR = 1.5
"""times the floor, of a decoding step"""


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bytes_a_second() -> float:
    """Of reading memory, by all threads: the sum of a tensor that no cache holds."""
    numbers = torch.ones(1 << 28, dtype=torch.float32)
    return numbers.numel() * 4 / seconds(numbers.sum)


def products_a_second(model: Any) -> float:
    """Operations of a product of PROMPT rows with the widest layer's shape, in the model's dtype."""
    config = model.config.get_text_config()
    rows = torch.ones(PROMPT, config.hidden_size, dtype=model.dtype)
    weight = torch.ones(config.intermediate_size, config.hidden_size, dtype=model.dtype)

    def some() -> None:
        for _ in range(8):
            torch.nn.functional.linear(rows, weight)

    return 8 * 2 * rows.shape[0] * weight.numel() / seconds(some)


def used_weights(model: Any) -> tuple[int, int]:
    """Numbers of weights: of the layers, and of the head; the embedding is looked up."""
    head = model.get_output_embeddings().weight.numel()
    table = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    whole = sum(weight.numel() for weight in model.parameters())
    return whole - table - (0 if tied else head), head


def generated(engine: Engine, rows: int, tokens: int, seed: int) -> float:
    """Seconds of rows that sample `tokens` behind one prompt, drawn anew for each seed."""
    draw = torch.Generator().manual_seed(seed)
    prompt = tuple(torch.randint(5, engine.model.config.vocab_size, (PROMPT,), generator=draw).tolist())
    sampling = Sampling(max_tokens=tokens)
    requests = [GenerationRequest(prompt, sampling, seed + row) for row in range(rows)]
    return seconds(lambda: engine.generate(requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="coder-1.5b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    model: Any = open_weights(asked.model, dtype="auto").loaded.model
    layers, head = used_weights(model)
    size = model.dtype.itemsize
    engine = Engine(model, eos_ids=frozenset(), context_limit=2 * (PROMPT + STEPS))
    found: dict[str, list[float]] = {}
    for lap in range(asked.rounds + 1):
        read, multiplied = bytes_a_second(), products_a_second(model)
        laps = {"GB/s": read / 1e9, "TFLOP/s": multiplied / 1e12}
        prompt = generated(engine, 1, 1, 1000 * lap)
        laps[f"prompt of {PROMPT}"] = prompt / (2 * (PROMPT * layers + head) / multiplied)
        for rows in asked.rows:
            short, long = (generated(engine, rows, n, 1000 * lap + n) for n in (1, 1 + STEPS))
            step = (long - short) / STEPS
            laps[f"step of {rows}, ms"] = 1000 * step
            laps[f"step of {rows}"] = step / (size * (layers + head) / read)
        if lap:  # the first warms up
            for name, value in laps.items():
                found.setdefault(name, []).append(value)
    middle = {name: round(median(values), 2) for name, values in found.items()}
    machine = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    facts = {"model": asked.model, "dtype": str(model.dtype).removeprefix("torch."), "machine": machine}
    print(json.dumps(facts | middle, indent=1))
    for rows in asked.rows:
        if middle[f"step of {rows}"] > BAR:
            print(f"a step of {rows} rows takes {middle[f'step of {rows}']} times its floor (bar {BAR})")
    if asked.write:
        done = json.loads(RESULT.read_text()) if RESULT.is_file() else {"rows": []}
        kept = [row for row in done["rows"] if (row["model"], row["dtype"]) != (asked.model, facts["dtype"])]
        command = "python benchmarks/floor.py --model MODEL --write"
        RESULT.write_text(json.dumps({"command": command, "rows": [*kept, facts | middle]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
