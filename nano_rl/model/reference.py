"""The reference policy of the KL term: the weights that training began from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nano_rl.batch import Batch
from nano_rl.model.logprob import token_logprobs


class Reference:
    """Scores batches with the starting weights: under LoRA the adapter-free base, otherwise a frozen copy.

    Create it before the first update. A resumed run loads the starting weights first, then its state.
    """

    def __init__(self, model: Any) -> None:
        self._adapted = hasattr(model, "peft_config")
        self._model: nn.Module = model if self._adapted else copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with `reference_logprobs_BT` filled in."""
        with self._bare():
            return [batch.with_reference(token_logprobs(self._model, batch)) for batch in batches]

    def _bare(self) -> AbstractContextManager[Any]:
        model: Any = self._model
        return model.disable_adapter() if self._adapted else nullcontext()
