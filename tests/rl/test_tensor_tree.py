"""Trees of tensors on disk: what is written comes back, to the bit and with its types."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_rl.resume import load_tree, save_tree

KEYS = st.one_of(st.text(max_size=5), st.integers(-9, 9))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9))
TREES = st.recursive(LEAVES, lambda t: st.lists(t, max_size=4) | st.dictionaries(KEYS, t, max_size=4))


def again(tree: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        save_tree(Path(folder), "tree", tree)
        return load_tree(Path(folder), "tree")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_plain_values_come_back(tree: Any) -> None:
    assert again(tree) == tree


def test_tensors_come_back_to_the_bit() -> None:
    weight = torch.tensor([[0.1, -0.0], [math.inf, 1e-45]])
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": weight.t()}, 1: {}},
        "rng": torch.get_rng_state(), "half": weight.to(torch.bfloat16), "loss": math.nan,
        "betas": (0.9, 0.95), "weight": weight, "tied": {"weight": weight},
    }  # fmt: skip
    back = again(tree)
    assert torch.equal(back["state"][0]["exp_avg"], weight.t())
    assert str(back["state"][0]["exp_avg"].tolist()) == str(weight.t().tolist())  # the sign of zero too
    assert back["half"].dtype == torch.bfloat16
    assert torch.equal(back["rng"], tree["rng"])
    assert torch.equal(back["tied"]["weight"], back["weight"])
    assert math.isnan(back["loss"])
    assert back["betas"] == [0.9, 0.95]


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_tree(tmp_path, "tree", {"model": torch.nn.Linear(1, 1)})
