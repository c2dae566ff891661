"""Whether a training fits into the memory that is there: the plan of one, and refusals of what does not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config

from nano_coder.config import catalogue, load_config
from nano_coder.models.local.engine import kv_bound, kv_token_bytes, rows_together
from nano_coder.models.opening import model_config, name_to_train
from nano_coder.models.weights import build_empty, place
from nano_plan.memory import (
    MemoryPlan,
    Workload,
    available_bytes,
    plan_memory,
    probe_speed,
    row_bytes,
    settings_that_fit,
)
from nano_plan.recommend import Recommendation, recommend
from nano_rl.config import TrainConfig
from nano_rl.learn.config import UpdateConfig
from nano_shared.errors import UsageError

_LEAST_TOKENS = 256
"""tokens of the shortest row that a training is sure to meet"""
_QWEN = re.compile(r"Qwen/Qwen2\.5-(?:Coder-)?([\d.]+B)(?:-Instruct)?(?:-GGUF)?", re.IGNORECASE)
_QWEN_SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864), "1.5B": (1536, 28, 12, 2, 8960), "3B": (2048, 36, 16, 2, 11008),
    "7B": (3584, 28, 28, 4, 18944), "14B": (5120, 48, 40, 8, 13824), "32B": (5120, 64, 40, 8, 27648),
}  # fmt: skip
"""size -> hidden, layers, heads, heads of keys and values, intermediate"""


def known_shape(name: str) -> Any:
    """The configuration of a model of the catalogue, or of a hub id, whose shape is known; else None."""
    entry = catalogue().get(name)
    match = _QWEN.fullmatch(entry.hub if entry else name)
    shape = _QWEN_SHAPES.get(match[1].upper()) if match else None
    if shape is None:
        return None
    hidden, layers, heads, keys, inside = shape
    small = hidden < 3000
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        intermediate_size=inside, vocab_size=151_936 if small else 152_064, tie_word_embeddings=small,
        max_position_embeddings=32_768,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    name: str
    config: TrainConfig
    memory: MemoryPlan
    available: int
    device: Any
    model_config: Any
    work: Workload
    token_bytes: int
    """of keys and values, in bfloat16"""
    count: Callable[[TrainConfig, Workload], MemoryPlan]
    fitting: Callable[[], dict[str, Any] | None]
    """finds settings with which it fits"""
    needed: int
    """bytes on the device: on a CPU of all ranks together, on a GPU of rank 0"""
    kv_given: bool
    """whether the bound of the KV cache was set"""

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def is_here(self) -> bool:
        return self.device.type == "cpu" or torch.cuda.is_available()

    def recommended(self, given: Collection[str]) -> Recommendation | None:
        rows = self.config.prompts_per_step * max(1, self.config.group_size)
        given = {*given, *(["kv_gib"] if self.kv_given else [])}
        return recommend(
            self.count, self.config, replace(self.work, rows=rows), self.available,
            token_bytes=self.token_bytes, given=given,
        )  # fmt: skip

    def report(self, best: Recommendation | None) -> dict[str, Any]:
        shown = best and {
            "command": best.command(self.name, str(self.device)), "rows_together": best.rows,
            "kv_gib": best.work.kv_bytes / 2**30, "total": best.total,
        }  # fmt: skip
        fitting = {} if self.fits or best else self.fitting()
        of_ranks = {"other_rank": self.memory.other_rank} if self.memory.other_rank else {}
        return of_ranks | {
            "model": self.name, "device": str(self.device), "parameters": self.memory.parameters,
            "trained": self.memory.trained, "bytes": self.memory.parts, "total": self.memory.total,
            "available": self.available, "fits": self.fits, "settings_that_fit": fitting,
            "rows_together": self.work.rows_held(self.token_bytes), "recommended": shown,
        }  # fmt: skip

    def speed(self) -> dict[str, float]:
        rows = min(64, self.config.prompts_per_step * max(1, self.config.group_size))
        found = probe_speed(build_empty, self.model_config, self.config, rows, self.device)
        return {"training_tokens_per_second": found.training, "decoding_tokens_per_second": found.decoding}

    def remedy(self) -> str:
        if (found := self.fitting()) is None:
            return "no setting makes it fit; take a smaller model or a machine with more memory"
        return " ".join(f"--set {name}={_toml(value)}" for name, value in found.items()) + " makes it fit"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan_of(
    model: str | None,
    config: TrainConfig,
    device: str | torch.device | None,
    row_tokens: int = 2048,
    *,
    prompt_tokens: int = 0,
    ranks: int = 1,
    beside: int | None = None,
    memory: int | None = None,
) -> Planned:
    """The plan of a training of a local model by `ranks` processes, `beside` of them on the machine of rank 0
    (default: all others), within so many bytes (default: what is free). Raises UsageError for a model whose
    shape is not at hand, and for ranks that cannot train it."""
    at = device if device is None or isinstance(device, str) else str(device)
    agent = load_config({"model": model, "device": at}, Path())[0]
    name = agent.model or ""
    if (architecture := known_shape(name)) is None:
        architecture = model_config(name := name_to_train(agent.model))

    placed = device if isinstance(device, torch.device) else place(agent.device)
    if ranks > 1 and config.quantise:
        raise UsageError("ranks take no `quantise`: leave it out, or plan for one process")

    def skeleton(dtype: torch.dtype) -> torch.nn.Module:
        with torch.device("meta"):  # real weights of a large model would fill the memory
            empty: torch.nn.Module = build_empty(architecture, dtype)
        return empty

    kv_bytes = kv_bound(placed, agent.kv_gib, memory=memory)
    token_bytes = kv_token_bytes(skeleton(torch.bfloat16))
    rows = min(
        rows_together(placed, kv_bytes, token_bytes), config.prompts_per_step * max(1, config.group_size)
    )
    work = Workload(
        rows=rows, row_tokens=row_tokens, kv_bytes=kv_bytes, prompt_tokens=prompt_tokens,
        group_size=config.group_size,
    )  # fmt: skip
    plan = partial(
        plan_memory, skeleton, device=placed, ranks=ranks, rollout_ranks=config.rollout_ranks(ranks),
        offload=config.offload and placed.type != "cpu",
    )  # fmt: skip
    sharing = (ranks - 1 if beside is None else beside) * (placed.type == "cpu")

    def needs(memory: MemoryPlan) -> int:
        return memory.total + sharing * memory.other_rank

    def with_settings(changed: UpdateConfig) -> float:
        return math.inf if ranks > 1 and changed.quantise else needs(plan(config=changed, work=work))

    counted, room = plan(config=config, work=work), memory or available_bytes(placed)
    return Planned(
        name=name, config=config, memory=counted, available=room, device=placed, model_config=architecture,
        fitting=partial(settings_that_fit, with_settings, config, room),
        needed=needs(counted), work=work, token_bytes=token_bytes, kv_given=agent.kv_gib is not None,
        count=lambda config, work: plan(config=config, work=work),
    )  # fmt: skip


def refuse_unfit(
    model: str | None, config: TrainConfig, device: str | None, *, ranks: int = 1, beside: int = 0
) -> None:
    """Raises UsageError for a training that cannot fit, with the settings that make it fit.

    Of the parts that depend on the tasks, it counts a single short row.
    """
    least = config.model_copy(update={"max_tokens": min(_LEAST_TOKENS, config.max_tokens), "group_size": 0})
    least = least.model_copy(update={"prompts_per_step": 1})
    planned = plan_of(model, least, device, _LEAST_TOKENS, ranks=ranks, beside=beside)
    if not planned.fits:
        raise UsageError(
            f"training {planned.name} takes at least {planned.needed / 2**30:.1f} GiB, and"
            f" {planned.available / 2**30:.1f} GiB are free on {planned.device}: {planned.remedy()};"
            " nano-rl plan shows the parts"
        )


def refuse_long_row(model: nn.Module, longest: int, config: TrainConfig) -> None:
    """Raises UsageError for a row longer than `max_tokens` that does not fit into the free memory."""
    device = next(model.parameters()).device
    causal = getattr(model, "get_base_model", lambda: model)()
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        skeleton = build_empty(causal.config, next(causal.parameters()).dtype)
    kept = config.model_copy(update={"gradient_checkpointing": True})
    need, least, room = (
        row_bytes(skeleton, config, longest, device), row_bytes(skeleton, kept, longest, device),
        available_bytes(device),
    )  # fmt: skip
    if need <= room:
        return
    helps = f"gradient_checkpointing = true takes {least / 2**30:.1f} GiB" if least <= room else ""
    raise UsageError(
        f"a row of {longest} tokens takes {need / 2**30:.1f} GiB to learn from, and {room / 2**30:.1f}"
        f" GiB are free on {device}: {helps or 'no setting makes it fit'}; --limit max_run_tokens=N keeps"
        " rollouts shorter (the last step is saved; another setting needs another --name)"
    )
