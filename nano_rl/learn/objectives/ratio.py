"""Ratios of two policies, of each token or over each token row."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""log-ratios are clamped to this before exp, in nats; the gradient beyond it is zero"""


def clamped_exp(log_ratio_N: Tensor) -> Tensor:
    """exp that stays finite."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def row_sums(values_N: Tensor, row_N: Tensor) -> Tensor:
    """[N] at each token the sum over its row."""
    if not row_N.numel():
        return values_N
    rows = int(row_N.max()) + 1
    return values_N.new_zeros(rows).index_add(0, row_N, values_N)[row_N]


def row_means(values_N: Tensor, row_N: Tensor) -> Tensor:
    """[N] at each token the mean over its row."""
    return row_sums(values_N, row_N) / row_sums(torch.ones_like(values_N), row_N)


def sums_to_the_end(values_N: Tensor, row_N: Tensor) -> Tensor:
    """[N] at each token the sum over itself and all after it in its row. Tokens lie row by row, in order."""
    # float64, for the running sum goes over all rows
    before_N = values_N.double().cumsum(0) - values_N.double()
    if not row_N.numel():
        return values_N
    starts = torch.ones_like(row_N, dtype=torch.bool)
    starts[1:] = row_N[1:] != row_N[:-1]
    offset_N = before_N[starts][starts.cumsum(0) - 1]
    return (row_sums(values_N.double(), row_N) - (before_N - offset_N)).to(values_N)
