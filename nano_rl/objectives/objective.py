"""An objective: the surrogate that defines it, and the settings that its paper names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.objectives.config import ObjectiveConfig


class Surrogate(Protocol):
    """The loss of each token, to be minimised, before importance weights, KL and entropy."""

    def __call__(
        self, new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
    ) -> Tensor:
        """[N] `new_N` and `ratio_N` carry gradient; on the first update the ratio is exactly 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Torch-free, so that a config can be read without it."""

    surrogate: Surrogate
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """settings that the paper names; they fill what is not set"""
    fixed: tuple[str, ...] = ()
    """settings without which it would be another objective"""
    unused: tuple[str, ...] = ()
    """settings that it never reads"""
