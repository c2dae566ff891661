"""`nano-rl plan`: memory and speed of a training, and what makes it fit, before anything is loaded."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nano_coder.config import catalogue, load_config
from nano_rl.commands.options import DeviceOption, ModelOption
from nano_rl.config import TrainConfig
from nano_shared.command_line import JsonOption
from nano_shared.errors import UsageError
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    import torch

    from nano_plan.fit import Planned
    from nano_plan.recommend import Recommendation

FLAGS = {
    "Training": ("prompts_per_step", "group_size", "lora_rank", "max_tokens"),
    "Memory": ("dtype", "gradient_checkpointing", "quantise"),
}
_MIB = 2**20
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@settings_options(TrainConfig, FLAGS, names={"prompts_per_step": "--prompts"})
def command(
    settings: Settings[TrainConfig],
    model: ModelOption = None,
    device: DeviceOption = None,
    row_tokens: Annotated[int, Option(min=1, help="Tokens of the longest row.")] = 2048,
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
    from nano_rl.command_setup import adapter_rank

    room = named_memory(memory)
    chosen = load_config({"model": model, "device": device}, Path())[0]
    name = chosen.model or ""
    if name in catalogue() or _HUB_ID.fullmatch(name):  # it need not be here
        from nano_plan.fit import known_shape

        config = settings.config(adapter_rank(settings, model) if known_shape(name) is None else {})
    else:
        config = settings.config(adapter_rank(settings, model))
    from nano_plan.fit import plan_of

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
