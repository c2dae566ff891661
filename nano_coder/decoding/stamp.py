"""The stamp of live weights: tells whether a module has changed since its KV was computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PROBES = 4
"""elements of each parameter that are looked at"""

Stamp = tuple[object, ...]


def counter_stamp(model: nn.Module) -> Stamp:
    """Addresses and write counters of all parameters: cheap enough for every step.

    PyTorch counts every write in place; those through `.data` it does not.
    """
    return tuple((p.data_ptr(), p._version) for p in model.parameters())


def weight_stamp(model: nn.Module) -> Stamp:
    """The same, with a few elements of each parameter, which show a write through `.data` too."""
    with torch.no_grad():
        probes = torch.cat([_probe(p) for p in model.parameters()])
    return (*counter_stamp(model), tuple(probes.tolist()))


def _probe(parameter: Tensor) -> Tensor:
    # detach and not data: same memory, and nothing is counted
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _PROBES)][: _PROBES + 1].float()
