"""The trained tokens of a micro-batch, row by row: all that an objective reads besides current log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from nano_rl.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The N tokens where the mask is True, in the order that `logprobs_BT[mask_BT]` gives them."""

    weight_N: Tensor
    """what each token weighs in the loss; the step's sum to 1 under token and sequence aggregation"""
    advantages_N: Tensor
    behaviour_N: Tensor
    """log-probs of the sampler"""
    row_N: Tensor
    """int64: the row of each token"""
    old_N: Tensor | None
    """the trainer's log-probs at the start of the step; None where the weights have not moved since"""
    reference_N: Tensor | None
    """log-probs of the reference; needed where beta > 0"""

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        mask = batch.mask_BT
        old, reference = batch.old_logprobs_BT, batch.reference_logprobs_BT
        return cls(
            weight_N=batch.weight_BT[mask],
            advantages_N=batch.advantages_BT[mask],
            behaviour_N=batch.behaviour_logprobs_BT[mask],
            row_N=mask.nonzero(as_tuple=True)[0],
            old_N=None if old is None else old[mask],
            reference_N=None if reference is None else reference[mask],
        )

    def slice(self, start: int, stop: int) -> Tokens:
        """Some of the tokens: a separable objective can be evaluated on any slice, and the slices add up."""
        return self._map(lambda _, values_N: values_N[start:stop])

    def to(self, like: Tensor) -> Tokens:
        """The same tokens in the dtype and on the device of `like`; row numbers stay whole."""
        return self._map(lambda name, values_N: values_N.to(like.device if name == "row_N" else like))

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> Tokens:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Tokens(**{n: None if v is None else change(n, v) for n, v in values.items()})  # type: ignore[arg-type]
