"""`nano-rl plan`: memory and speed of a training, and what makes it fit, before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
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
    from nano_plan.memory import MemoryPlan
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
    ranks: Annotated[int, Option(min=1, help="Processes of torchrun, on one machine.")] = 1,
    probe: Annotated[bool, Option(help="Time a few layers, for tokens a second, where it fits.")] = True,
    as_json: JsonOption = False,
) -> int:
    """Say what `nano-rl train` with these options would take, and which settings make it fit."""
    from nano_rl.session import adapter_rank

    config = settings.config(adapter_rank(settings, model))
    planned = plan_of(model, config, device, row_tokens, ranks=ranks)
    # a training that does not fit has no speed, and three of its layers may not fit either
    speed = planned.speed() if probe and planned.fitting == {} else {}
    if as_json:
        print(json.dumps({**planned.report(), **speed}))
    else:
        _show(planned, speed)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    name: str
    config: TrainConfig
    memory: MemoryPlan
    available: int
    device: Any
    model_config: Any
    fitting: dict[str, Any] | None
    """settings with which it fits; empty if it does as it is"""
    needed: int
    """bytes on the device: on a CPU of all ranks together, on a GPU of rank 0"""
    needed_with: Callable[[UpdateConfig], float]

    def report(self) -> dict[str, Any]:
        of_ranks = {"other_rank": self.memory.other_rank} if self.memory.other_rank else {}
        return of_ranks | {
            "model": self.name, "device": str(self.device), "parameters": self.memory.parameters,
            "trained": self.memory.trained, "bytes": self.memory.parts, "total": self.memory.total,
            "available": self.available, "fits": self.fitting == {}, "settings_that_fit": self.fitting,
            "larger_max_tokens": self.larger_max_tokens(),
        }  # fmt: skip

    def larger_max_tokens(self) -> int | None:
        """On a GPU, which learns faster from larger micro-batches, one that fits; None if there is none."""
        from nano_plan.memory import wider_micro_batch

        if self.device.type == "cpu" or self.fitting != {}:
            return None
        return wider_micro_batch(self.needed_with, self.config, self.available)

    def speed(self) -> dict[str, float]:
        from nano_coder.models.weights import build_empty
        from nano_plan.memory import probe_speed

        rows = min(64, self.config.prompts_per_step * max(1, self.config.group_size))
        found = probe_speed(build_empty, self.model_config, self.config, rows, self.device)
        return {"training_tokens_per_second": found.training, "decoding_tokens_per_second": found.decoding}

    def remedy(self) -> str:
        if self.fitting is None:
            return "no setting makes it fit; take a smaller model or a machine with more memory"
        return (
            " ".join(f"--set {name}={_toml(value)}" for name, value in self.fitting.items()) + " makes it fit"
        )


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan_of(
    model: str | None,
    config: TrainConfig,
    device: str | None,
    row_tokens: int = ROW_TOKENS,
    *,
    ranks: int = 1,
    beside: int | None = None,
) -> Planned:
    """The plan of a training of a local model by `ranks` processes, `beside` of them on the machine of rank 0
    (default: all others). Raises UsageError for a model that is not at hand, and for ranks that cannot train
    it."""
    from nano_coder.models.opening import model_config, name_to_train

    agent = load_config({"model": model, "device": device}, Path())[0]
    name = name_to_train(agent.model)
    architecture = model_config(name)

    import torch

    from nano_coder.models.local.engine import kv_bound, kv_token_bytes, rows_together
    from nano_coder.models.weights import build_empty, place
    from nano_plan.memory import Workload, available_bytes, plan_memory, settings_that_fit

    placed = place(agent.device)
    if ranks > 1 and config.quantise:
        raise UsageError("ranks take no `quantise`: leave it out, or plan for one process")

    def skeleton(dtype: torch.dtype) -> torch.nn.Module:
        empty: torch.nn.Module = build_empty(architecture, dtype)
        return empty

    kv_bytes = kv_bound(placed, agent.kv_gib)
    most = rows_together(placed, kv_bytes, kv_token_bytes(skeleton(torch.bfloat16)))
    rows = min(most, config.prompts_per_step * max(1, config.group_size))
    work = Workload(rows=rows, row_tokens=row_tokens, kv_bytes=kv_bytes)
    plan = partial(
        plan_memory, skeleton, work=work, device=placed, ranks=ranks,
        offload=config.offload and placed.type != "cpu",
    )  # fmt: skip
    sharing = (ranks - 1 if beside is None else beside) * (placed.type == "cpu")

    def needs(memory: MemoryPlan) -> int:
        return memory.total + sharing * memory.other_rank

    def with_settings(changed: UpdateConfig) -> float:
        return math.inf if ranks > 1 and changed.quantise else needs(plan(config=changed))

    memory, room = plan(config=config), available_bytes(placed)
    return Planned(
        name=name, config=config, memory=memory, available=room, device=placed, model_config=architecture,
        fitting={} if needs(memory) <= room else settings_that_fit(with_settings, config, room),
        needed=needs(memory), needed_with=with_settings,
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
    if planned.fitting != {}:
        raise UsageError(
            f"training {planned.name} takes at least {planned.needed / 2**30:.1f} GiB, and"
            f" {planned.available / 2**30:.1f} GiB are free on {planned.device}: {planned.remedy()};"
            " nano-rl plan shows the parts"
        )


def _show(planned: Planned, speed: dict[str, float]) -> None:
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
    print("fits" if planned.fitting == {} else f"does not fit: {planned.remedy()}")
    if tokens := planned.larger_max_tokens():
        print(f"--set max_tokens={tokens} fits too: a GPU learns faster from larger micro-batches")
