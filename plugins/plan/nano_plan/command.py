"""`nano-rl plan`: memory and speed of a training, and what makes it fit, before anything is loaded."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nano_coder.config import load_config
from nano_rl.commands.options import DeviceOption, ModelOption
from nano_rl.config import TrainConfig
from nano_shared.command_line import JsonOption
from nano_shared.errors import UsageError
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    import torch

    from nano_plan.memory import MemoryPlan, Workload
    from nano_plan.recommend import Recommendation
    from nano_rl.learn.config import UpdateConfig

FLAGS = {
    "Training": ("prompts_per_step", "group_size", "lora_rank", "max_tokens"),
    "Memory": ("dtype", "gradient_checkpointing", "quantise"),
}
ROW_TOKENS = 2048
_LEAST_TOKENS = 256
"""tokens of the shortest row that a training is sure to meet"""
_MIB = 2**20


@settings_options(TrainConfig, FLAGS, names={"prompts_per_step": "--prompts"})
def command(
    settings: Settings[TrainConfig],
    model: ModelOption = None,
    device: DeviceOption = None,
    row_tokens: Annotated[int, Option(min=1, help="Tokens of the longest row.")] = ROW_TOKENS,
    prompt_tokens: Annotated[
        int | None,
        Option(min=0, help="Of them, those that a group shares.", show_default="a quarter"),
    ] = None,
    memory: Annotated[
        str | None,
        Option(
            metavar="GIB",
            help="Of the GPU, which need not be here, or of this machine.",
            show_default="what is free",
        ),
    ] = None,
    ranks: Annotated[int, Option(min=1, help="Processes of torchrun, on one machine.")] = 1,
    probe: Annotated[bool, Option(help="Time a few layers, for tokens a second, where it fits.")] = True,
    as_json: JsonOption = False,
) -> int:
    """Say what `nano-rl train` with these options would take, and which settings make it fit."""
    from nano_plan.shapes import known_shape
    from nano_rl.session import adapter_rank

    room = named_memory(memory)
    chosen = load_config({"model": model, "device": device}, Path())[0]
    known = chosen.model is not None and known_shape(chosen.model) is not None
    config = settings.config({} if known else adapter_rank(settings, model))
    placed = _place(chosen.device, room)
    prompt = row_tokens // 4 if prompt_tokens is None else prompt_tokens
    if prompt >= row_tokens:
        raise UsageError(
            f"--prompt-tokens {prompt} leaves nothing to sample of a row of {row_tokens}: give --row-tokens"
            " above it"
        )
    planned = plan_of(model, config, placed, row_tokens, prompt_tokens=prompt, ranks=ranks, memory=room)
    # a training that does not fit has no speed, and three of its layers may not fit either
    speed = planned.speed() if probe and planned.fits and planned.is_here else {}
    best = planned.recommended(settings.values) if placed.type != "cpu" and ranks == 1 else None
    if as_json:
        print(json.dumps({**planned.report(best), **speed}))
    else:
        _show(planned, speed, best)
    return 0


def named_memory(text: str | None) -> int | None:
    """Bytes of --memory. Raises UsageError."""
    if text is None:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 1 / 1024 <= gib <= 2**20:
        raise UsageError(
            f"--memory {text} is no number of GiB: give what the GPU or this machine has, for instance"
            " --memory 24"
        )
    return round(gib * 2**30)


def _place(device: str, memory: int | None) -> torch.device:
    """The device that is planned for; with `memory` a GPU that need not be here. Raises UsageError."""
    import torch

    from nano_coder.models.weights import place

    if memory is not None and device.startswith("cuda"):
        return torch.device(device)
    try:
        placed = place(device)
    except UsageError as problem:
        raise UsageError(
            f"{problem}; or say what the GPU has, which need not be here: --device {device} --memory 24"
        ) from None
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory is not None and placed.type == "cpu" and memory > has:
        raise UsageError(
            f"--memory {memory / 2**30:g} is more than the {has / 2**30:.1f} GiB of this machine; give at"
            " most that, or --device cuda for a GPU that is not here"
        )
    return placed


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
        import torch

        return self.device.type == "cpu" or torch.cuda.is_available()

    def recommended(self, given: Collection[str]) -> Recommendation | None:
        from nano_plan.recommend import recommend

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
        from nano_coder.models.weights import build_empty
        from nano_plan.memory import probe_speed

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
    row_tokens: int = ROW_TOKENS,
    *,
    prompt_tokens: int = 0,
    ranks: int = 1,
    beside: int | None = None,
    memory: int | None = None,
) -> Planned:
    """The plan of a training of a local model by `ranks` processes, `beside` of them on the machine of rank 0
    (default: all others), within so many bytes (default: what is free). Raises UsageError for a model whose
    shape is not at hand, and for ranks that cannot train it."""
    from nano_coder.models.opening import model_config, name_to_train
    from nano_plan.shapes import known_shape

    at = device if device is None or isinstance(device, str) else str(device)
    agent = load_config({"model": model, "device": at}, Path())[0]
    name = agent.model or ""
    if (architecture := known_shape(name)) is None:
        architecture = model_config(name := name_to_train(agent.model))

    import torch

    from nano_coder.models.local.engine import kv_bound, kv_token_bytes, rows_together
    from nano_coder.models.weights import build_empty, place
    from nano_plan.memory import Workload, available_bytes, plan_memory, settings_that_fit

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


def _show(planned: Planned, speed: dict[str, float], best: Recommendation | None) -> None:
    memory = planned.memory
    print(f"{planned.name} on {planned.device}: {memory.parameters:,} parameters, {memory.trained:,} trained")
    for name, size in memory.parts.items():
        if size:
            print(f"  {name:<20}{size / _MIB:>12,.0f} MiB")
    together, free = "together", f" of {planned.available / _MIB:,.0f} free"
    if memory.other_rank:
        print(f"  {'rank 0':<20}{memory.total / _MIB:>12,.0f} MiB")
        print(f"  {'each other rank':<20}{memory.other_rank / _MIB:>12,.0f} MiB")
        together = "on this machine" if planned.device.type == "cpu" else "on this GPU"
    print(f"  {together:<20}{planned.needed / _MIB:>12,.0f} MiB{free}")
    for name, value in speed.items():
        print(f"  {name.replace('_tokens_per_second', ''):<20}{value:>12,.0f} tokens/s")
    rows = planned.work.rows_held(planned.token_bytes)
    print(f"  {'decoded together':<20}{rows:>12,} rows of {planned.work.row_tokens:,}")
    if planned.fits:
        print("fits")
    else:
        print(f"does not fit: {'take what is recommended' if best else planned.remedy()}")
    if best is not None:
        print(
            f"recommended: {best.total / _MIB:,.0f} MiB, {best.rows} rows decoded together\n"
            f"  {best.command(planned.name, str(planned.device))}"
        )
