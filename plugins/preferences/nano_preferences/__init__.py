"""Pairs of runs, DPO, reward models, and the term on pairs beside a policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nano_preferences.log_pairs import log_pairs, pair_of, pairs_beside

if TYPE_CHECKING:
    from torch import nn

    from nano_coder.models.opening import OpenedWeights
    from nano_rl.config import TrainConfig

__all__ = ["log_pairs", "pair_of", "pairs_beside", "preference_term"]


def preference_term(
    model: nn.Module, opened: OpenedWeights, pairs: Sequence[Any], config: TrainConfig
) -> Any:
    """As `nano_preferences.dpo.preference_term`, which imports torch."""
    from nano_preferences import dpo

    return dpo.preference_term(model, opened, pairs, config)
