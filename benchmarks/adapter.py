"""What decodes is what was trained: an adapter on SmolLM2-135M in bfloat16, in the sampler and the trainer.

    python benchmarks/adapter.py [--part share|time] [--rates ...] [--updates ...] [--rows N] [--rounds N]
                                 [--smoke] [--json FILE]

share  of the gain in log-prob of N rows of 96 tokens, after so many updates on them: the gain in the
       forward pass that decodes, by that in the trainer's, with its standard error over tokens; and the
       same with the adapter merged into the weights, and rounded
time   of a rollout of 1 and of 32 rows with the adapter, by that with merged weights, measured in turn

`--smoke` takes a tiny model and few rows, for a look at whether it runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from integration.tiny_model import build_tiny
from nano_coder.models.local.engine import Engine
from nano_coder.models.local.sampler import GenerationRequest
from nano_coder.models.weights import BASE, load_policy
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.learner import Learner, prepare
from nano_rl.learn.logprob import token_logprobs
from nano_shared.lora import merge_adapter
from nano_shared.types import Sampling

RANK, TOKENS, PROMPT = 16, 96, 8
SOURCES = sorted(Path(__file__).parents[1].glob("nano_rl/learn/**/*.py"))


class Trained:
    """An adapter that is trained on rows of source text, and the log-probs that each side gives them."""

    def __init__(self, name: str, rate: float, rows: int) -> None:
        loaded = load_policy(name, dtype="bfloat16", device="cpu")
        self.model: Any = prepare(loaded.model, lora_rank=RANK, seed=0)
        self.learner = Learner(self.model, OptimizerConfig(learning_rate=rate), steps=1000)
        text = "\n".join(file.read_text() for file in SOURCES)
        ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        step = (len(ids) - TOKENS) // rows
        self.rows = [tuple(ids[row * step : row * step + TOKENS]) for row in range(rows)]
        self.batches = make_batches([_sample(row) for row in self.rows], max_tokens=2048)

    def update(self) -> None:
        self.learner.update(self.batches, _likelihood, lambda _: None)

    def trainer(self) -> Tensor:
        with torch.no_grad():
            parts = [token_logprobs(self.model, batch)[batch.mask_BT] for batch in self.batches]
        return torch.cat(parts).double()

    def sampler(self, model: Any) -> Tensor:
        """In the order of `trainer`."""
        engine = _engine(model)
        rows = [tuple(ids.tolist()) for batch in self.batches for ids in batch.ids_BT]
        return torch.tensor(
            [value for row in rows for value in engine.score_decoding(row, first=PROMPT)]
        ).double()

    def merged(self) -> Any:
        return merge_adapter(copy.deepcopy(self.model))[0]


def _sample(ids: tuple[int, ...]) -> TrainSample:
    count = len(ids)
    return TrainSample(
        ids=ids, mask=(0,) * PROMPT + (1,) * (count - PROMPT), logprobs=(0.0,) * count, versions=(0,) * count,
        turn_ids_T=(0,) * count, advantage=1.0, temperature=1.0, run_id=str(hash(ids)), key=str(hash(ids)),
    )  # fmt: skip


def _likelihood(model: Any, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    loss = -(token_logprobs(model, batch) * batch.weight_BT).sum()
    return loss, {"loss": loss.item(), "tokens": float(batch.mask_BT.sum())}


def _engine(model: Any) -> Engine:
    return Engine(model, eos_ids=frozenset(), context_limit=1024)


def shares(name: str, rate: float, updates: list[int], rows: int) -> list[dict[str, float]]:
    trained = Trained(name, rate, rows)
    trainer, sampler = trained.trainer(), trained.sampler(trained.model)
    found = []
    for done in range(1, max(updates) + 1):
        trained.update()
        if done not in updates:
            continue
        gain = trained.trainer() - trainer
        values: dict[str, float] = {"rate": rate, "updates": done, "tokens": len(gain)}
        values["gain"] = gain.mean().item()
        for side, model in (("apart", trained.model), ("merged", trained.merged())):
            shown = trained.sampler(model) - sampler
            values[side] = (shown.mean() / gain.mean()).item()
            error = (shown - values[side] * gain).std() / math.sqrt(len(gain)) / gain.mean().abs()
            values[f"{side}_error"] = error.item()
        print(
            f"share  rate {rate:g}, {done:2} updates: gain {values['gain']:.4f} nats a token, arrives"
            f" {values['apart']:.1%} (+- {values['apart_error']:.1%}); merged {values['merged']:.1%}",
            flush=True,
        )  # fmt: skip
        found.append(values)
    return found


def times(name: str, rounds: int, prompt: int, completion: int) -> list[dict[str, float]]:
    trained = Trained(name, 1e-4, 2)
    trained.update()
    sides = {"apart": trained.model, "merged": trained.merged()}
    found = []
    for rows in (1, 32):
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for lap in range(rounds + 1):
            for side, model in sides.items():
                took = _rollout(model, rows, prompt, completion, seed=lap)
                if lap:  # the first warms up
                    seconds[side].append(took)
        ratio = median(a / b for a, b in zip(seconds["apart"], seconds["merged"], strict=True))
        values = {side: median(laps) for side, laps in seconds.items()} | {"rows": rows, "ratio": ratio}
        print(
            f"time   {rows:2} rows: apart {values['apart']:.2f} s, merged {values['merged']:.2f} s,"
            f" median ratio {ratio:.2f}", flush=True,
        )  # fmt: skip
        found.append(values)
    return found


def _rollout(model: Any, rows: int, prompt: int, completion: int, *, seed: int) -> float:
    """Seconds of a rollout with prompts that no engine has seen; without the layout of the weights, which is
    one copy for either."""
    engine = _engine(model)
    drawn = torch.randint(
        5, model.config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(seed)
    )
    engine.generate([GenerationRequest((1, 2, 3), Sampling(max_tokens=2), 0)])
    requests = [
        GenerationRequest(tuple(ids), Sampling(max_tokens=completion), i)
        for i, ids in enumerate(drawn.tolist())
    ]
    started = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 3, 10])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["share", "time"], help="default both")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name, rows, rounds = BASE, options.rows, options.rounds
        if options.smoke:
            name = str(
                build_tiny(Path(folder) / "tiny", [file.read_text() for file in SOURCES], vocab_size=400)
            )
            rows, rounds = 8, 1
        found: dict[str, Any] = {}
        if options.part != "time":
            found["shares"] = [v for rate in options.rates for v in shares(name, rate, options.updates, rows)]
        if options.part != "share":
            found["times"] = times(name, rounds, *((16, 8) if options.smoke else (128, 64)))
    if options.json:
        command = " ".join(["python benchmarks/adapter.py", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
