"""Refusals of what does not fit: a training before it begins, and a row before it is learned from."""

from __future__ import annotations

import torch
from torch import nn

from nano_coder.models.weights import build_empty
from nano_plan.command import refuse_unfit
from nano_plan.memory import available_bytes, row_bytes
from nano_rl.config import TrainConfig
from nano_shared.errors import UsageError

__all__ = ["refuse_long_row", "refuse_unfit"]


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
