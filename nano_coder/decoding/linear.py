"""Linear layers of a decoder, laid out once for the many small products of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_ROWS = 8
"""of the products that a layout is made for; it serves any other number as well"""


class Weights(NamedTuple):
    matrix: Tensor
    """[out, in]"""
    bias: Tensor | None


class Linear:
    """[N, in] -> [N, out]"""

    def __init__(self, weights: Weights) -> None:
        self.matrix, self._bias = weights
        self._packed = packs(self.matrix)
        if self._packed:
            self.matrix = torch.ops.mkldnn._reorder_linear_weight(self.matrix, _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self._bias, "none", [], "")
            return product
        return F.linear(x, self.matrix, self._bias)


class Joined:
    """Layers of one input, [N, in] -> [N, out] for each: one product where the weights are packed."""

    def __init__(self, parts: Sequence[Weights]) -> None:
        self._sizes = [part.matrix.shape[0] for part in parts]
        one = packs(parts[0].matrix) and len({part.bias is None for part in parts}) == 1
        self.layers = [Linear(part) for part in ([_joined(parts)] if one else parts)]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(self.layers) == 1:
            return torch.split(self.layers[0](x), self._sizes, dim=-1)
        return [layer(x) for layer in self.layers]


def packs(matrix: Tensor) -> bool:
    """Whether a layout of its own makes products with these weights quicker: bfloat16 on a CPU that has it.

    A step reads all weights for a few rows; of a plain matrix that takes half as long again. In float32 the
    layout wins nothing.
    """
    if matrix.device.type != "cpu" or matrix.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _joined(parts: Sequence[Weights]) -> Weights:
    biases = [part.bias for part in parts if part.bias is not None]
    return Weights(torch.cat([part.matrix for part in parts]), torch.cat(biases) if biases else None)
