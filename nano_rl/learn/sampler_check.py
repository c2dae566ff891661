"""Rollouts ahead of time, held against the weights that sampled them, which the trainer has kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nano_rl.learn.model.first_look import mean_and_max
from nano_rl.learn.model.logprob import can_share, token_logprobs
from nano_rl.learn.rows.batch import make_batches
from nano_rl.learn.rows.sample import TrainSample


def mismatch_ahead(
    model: nn.Module, samples: Sequence[TrainSample], weights: Mapping[str, Tensor], *, max_tokens: int
) -> dict[str, float]:
    """`mismatch_ahead` and `mismatch_ahead_max`: |sampler - trainer| of the tokens of one micro-batch, mean
    and largest, nats, the trainer with the weights that sampled them.

    One micro-batch, the step's most expensive, and one pass without gradient: a bound on what it costs.
    """
    batches = make_batches(samples, max_tokens=max_tokens, trees=can_share(model))
    if not batches:
        return {}
    device = next(model.parameters()).device
    batch = batches[0].to(device)
    with torch.no_grad(), as_it_was(model, weights):
        gap_BT = (token_logprobs(model, batch) - batch.behaviour_logprobs_BT).abs()
    return mean_and_max("mismatch_ahead", [gap_BT[batch.mask_BT].cpu()])


@contextmanager
def as_it_was(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values for the weights that train; nothing is copied where both lie in memory."""
    parameters = dict(model.named_parameters())
    live = {name: parameters[name].data for name in weights}
    try:
        for name, value in weights.items():
            parameters[name].data = value.to(live[name])
        yield
    finally:
        for name, data in live.items():
            parameters[name].data = data
