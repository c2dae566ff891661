"""float32 masters of low-precision weights: the model computes in bfloat16, the optimizer moves the masters.

At the learning rates of policy gradients an update is smaller than half a unit in the last place of bfloat16
and would be rounded away; in the masters updates add up until they show. The model itself is the one working
copy: it trains and it samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn


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
