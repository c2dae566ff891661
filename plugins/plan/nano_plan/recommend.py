"""The training that the memory of a GPU holds, and the command line that starts it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

import torch

from nano_coder.models.local.engine import rows_together
from nano_plan.memory import MemoryPlan, Workload
from nano_rl.config import TrainConfig

_ERROR = 1.15
"""measured peaks are up to 14 % above predicted ones"""
_FEWEST = 8
"""rows decoded together for which weights are taken that need less memory"""
_MICRO_BATCHES = (65536, 32768, 16384, 8192, 4096)
_OPTIONS = {
    "prompts_per_step": "--prompts ", "group_size": "--group-size ", "lora_rank": "--lora-rank ",
    "dtype": "--set dtype=", "quantise": "--set quantise=",
    "gradient_checkpointing": "--set gradient_checkpointing=", "max_tokens": "--set max_tokens=",
}  # fmt: skip
"""how `nano-rl train` is given a setting"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    config: TrainConfig
    work: Workload
    rows: int
    """decoded together; the others wait"""
    sets_kv: bool
    """whether the bound of the KV cache has to be set"""
    total: int
    """bytes at the peak"""

    def command(self, model: str, device: str) -> str:
        before = f"NANO_KV_GIB={self.work.kv_bytes / 2**30:g} " if self.sets_kv else ""
        values = ((option, getattr(self.config, name)) for name, option in _OPTIONS.items())
        options = "".join(f" {option}{str(value).lower()}" for option, value in values if value is not None)
        longest = self.work.row_tokens - self.work.prompt_tokens
        return (
            f"{before}nano-rl train --name NAME --tasks tasks.jsonl --model {quote(model)} --device {device}"
            f"{options} --limit max_run_tokens={longest}"
        )


def recommend(
    count: Callable[[TrainConfig, Workload], MemoryPlan],
    config: TrainConfig,
    work: Workload,
    room: int,
    *,
    token_bytes: int,
    given: Collection[str] = (),
) -> Recommendation | None:
    """The training on a GPU that takes at most `room` bytes, the error of the prediction included; None if
    there is none. Settings that are `given` stay, and so does the bound of the KV cache if `kv_gib` is.
    `token_bytes`: those of a token's keys and values in bfloat16.

    Of the weights it takes the first that leave room for a row to learn from and a few that are decoded.
    Activations are computed again only where those of a row do not fit. Then as many rows are decoded, and
    micro-batches are as large, as fit beside the rest: learning and decoding use the same memory in turn.
    """
    room, sets_kv = int(room / _ERROR), "kv_gib" not in given
    token_bytes *= 2 if "dtype" in given and config.dtype == "float32" else 1

    def kv(rows: int) -> int:
        return work.kv_tokens(min(rows, work.rows)) * token_bytes

    for weights in _weights(config, given):
        for again in (False, True):
            settings = {**weights, "gradient_checkpointing": again, "max_tokens": work.row_tokens}
            tried = config.model_copy(update={n: v for n, v in settings.items() if n not in given})
            parts = count(tried, replace(work, kv_bytes=0)).parts
            learning, copied = parts["activations"] + parts["logits"], parts["sampler's copy"]
            rest = sum(parts.values()) - learning - copied - parts["used in turn"]
            space = room - rest
            least = kv(_FEWEST) if sets_kv else min(work.kv_bytes, kv(work.rows))
            if copied + least > space:
                break  # whatever learning takes
            if learning > space:
                continue
            if "max_tokens" not in given:
                most = min(space / learning, work.rows) * work.row_tokens
                tokens = next((n for n in _MICRO_BATCHES if work.row_tokens <= n <= most), work.row_tokens)
                tried = tried.model_copy(update={"max_tokens": tokens})
                learning = learning * tokens // work.row_tokens
            usual = min(work.kv_bytes, kv(work.rows))
            sets_kv = sets_kv and (usual < kv(work.rows) or copied + usual > space)
            if sets_kv:
                tenths = min(-(-kv(work.rows) * 10 // 2**30), (space - copied) * 10 // 2**30)
                work = replace(work, kv_bytes=int(tenths * 2**30 / 10))
            decoding = copied + min(work.kv_bytes, kv(work.rows))
            bound = rows_together(torch.device("cuda"), work.kv_bytes, token_bytes)
            return Recommendation(
                config=tried, work=work, rows=min(bound, work.rows_held(token_bytes)), sets_kv=sets_kv,
                total=rest + max(learning, decoding),
            )  # fmt: skip
    return None


def _weights(config: TrainConfig, given: Collection[str]) -> Iterator[dict[str, Any]]:
    """What is trained, what costs least first: all weights or the adapter that was asked for, an adapter, one
    over 4 bits."""
    usual: dict[str, Any] = {"dtype": "bfloat16"}
    if config.lora_rank or config.quantise is None:
        yield usual
    if not config.lora_rank:
        if "lora_rank" in given:
            return
        usual |= {"lora_rank": 16}
        yield usual
    if "quantise" not in given:
        yield usual | {"quantise": "4bit"}
