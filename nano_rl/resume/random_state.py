"""The random numbers of the process: seeded at the start of a training, and restored when it goes on.

Rollouts, task order and adapters draw from generators of their own; these are for what a training calls
that does not: a reward function of the user's, a library.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The state of those generators, as a tree (`tensor_tree`)."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Go on from `random_state()`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))
