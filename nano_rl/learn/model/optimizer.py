"""AdamW over the trainable weights, its learning rate as a pure function, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from nano_rl.learn.config.training import OptimizerConfig, Schedule
from nano_shared import ConfigError


class Masters:
    """The trained weights of a model as the optimizer should see them.

    A gradient moves to its float32 master, and is freed, as soon as the backward pass has it; over
    micro-batches it adds up there in float32. Weights of float32 or more are their own masters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """master of each trained weight, by the weight's name"""
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            self.parameters[name] = weight
            if torch.finfo(weight.dtype).bits < 32:
                master = nn.Parameter(weight.detach().float())
                self.parameters[name] = master
                self._copies.append((weight, master))
                weight.register_post_accumulate_grad_hook(_mover(master))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model: after every step of the optimizer."""
        for weight, master in self._copies:
            weight.copy_(master)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the masters, and the model with them, to values by name."""
        for name, value in weights.items():
            self.parameters[name].copy_(value)
        self.publish()


def _mover(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def move(weight: torch.Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    return move


_FUSED = ("cpu", "cuda")


def make_optimizer(
    model: nn.Module | Mapping[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over weights that require a gradient; only matrices decay.

    `model` may be given as its trained weights by name (`masters.Masters.parameters`).

    Raises ConfigError when nothing is trainable, and for trainable weights below float32: at RL learning
    rates an update is smaller than half a unit in the last place of bfloat16 and would be rounded away.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    trainable = {name: p for name, p in named if p.requires_grad}
    if not trainable:
        raise ConfigError("no weight requires a gradient: nothing to train; attach an adapter or unfreeze")
    for name, p in trainable.items():
        if torch.finfo(p.dtype).bits < 32:
            raise ConfigError(f"{name} is {p.dtype}: updates would be rounded away; give float32 masters")
    matrices = [p for p in trainable.values() if p.ndim >= 2]
    vectors = [p for p in trainable.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    # fused: one pass over weight, gradient and moments, where the plain one makes a dozen
    fused = all(p.device.type in _FUSED for p in trainable.values())
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=fused)


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
    weights = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
    if not bool(norm <= max_norm):  # true of one that is not a number too
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm.item()
