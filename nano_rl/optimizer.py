"""AdamW over the trainable weights, its learning rate as a pure function, and gradient clipping.

Weights below float32 are trained by way of a float32 copy, which takes the updates and is rounded into
them after each: at RL learning rates an update is smaller than half a unit in the last place of bfloat16 and
would be lost. With the copy they take the memory that float32 would; what is halved are activations and
their traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nano_rl.config import OptimizerConfig, Schedule
from nano_shared import ConfigError


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose parameters are float32 copies of the weights that are less precise, and the others as they
    are. Takes and gives what torch's does; the copies are part of its state."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        super().__init__([{**g, "params": [self._master(p) for p in g["params"]]} for g in groups], lr=lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for weight, master in self._copies:
            master.grad = None if weight.grad is None else weight.grad.float()
        loss = super().step(closure)
        for weight, master in self._copies:
            weight.copy_(master)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight, _ in self._copies:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [master.detach() for _, master in self._copies]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        for (_, master), value in zip(self._copies, state.pop("masters"), strict=True):
            master.copy_(value)
        super().load_state_dict(state)

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if torch.finfo(weight.dtype).bits >= 32:
            return weight
        master = nn.Parameter(weight.detach().float())
        self._copies.append((weight, master))
        return master


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) over weights that require a gradient; only matrices decay.

    Raises ConfigError when nothing is trainable.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("no weight requires a gradient: nothing to train; attach an adapter or unfreeze")
    matrices = [p for p in trainable.values() if p.ndim >= 2]
    vectors = [p for p in trainable.values() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    return MasterAdamW([g for g in groups if g["params"]], lr=config.learning_rate)


def lr_at(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, steps: int) -> float:
    """Learning rate of the update at `step`, counted from 0.

    Rises linearly to `peak` at step `warmup_steps`, never starting at 0; then stays, or falls to 0 just after
    the last of `steps`, on a line or half a cosine.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients so that their joint norm is at most `max_norm`; returns the norm before that.

    A non-finite norm is returned and leaves the gradients unusable: the guards stop the run on it.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
