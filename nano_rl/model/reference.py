"""The reference policy of the KL term: the weights that training began from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from nano_rl.batch import Batch
from nano_rl.model.logprob import token_logprobs


class Reference:
    """Scores batches with the starting weights: a copy of all that is trained, and of nothing else.

    So the reference of an adapter that has learnt before is that adapter, not the bare model under it.
    Create it before the first update. A resumed run loads the starting weights first, then its state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with `reference_logprobs_BT` filled in."""
        with self._at_the_start():
            return [batch.with_reference(token_logprobs(self._model, batch)) for batch in batches]

    @contextmanager
    def _at_the_start(self) -> Iterator[None]:
        trained = {name: p for name, p in self._model.named_parameters() if name in self._start}
        now = {name: p.data for name, p in trained.items()}
        for name, parameter in trained.items():
            parameter.data = self._start[name]
        try:
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = now[name]
