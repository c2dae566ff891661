"""What each trained token weighs: the three means, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
from builders import terms, trajectory, turn
from hypothesis import given
from hypothesis import strategies as st

from nano_rl.learn.batch import make_batches
from nano_rl.learn.groups import TrainSample, to_samples
from nano_rl.learn.loss import policy_loss, token_weights
from nano_rl.learn.objectives import Aggregation


def rows(*sampled: int, run_id: str = "run", advantage: float = 1.0) -> list[TrainSample]:
    """The samples of one trajectory with a token row for each count."""
    turns = [turn(2, n, row=i, index=i) for i, n in enumerate(sampled)]
    return to_samples(trajectory(*turns, run_id=run_id), advantage)


def loss(samples: list[TrainSample], aggregation: Aggregation, length: int = 8) -> float:
    weights = token_weights(samples, aggregation, constant_length=length)
    (batch,) = make_batches(samples, max_tokens=10_000, weights=weights, dtype=torch.float64)
    zeros = torch.zeros(batch.ids_BT.shape, dtype=torch.float64)
    return policy_loss(zeros, batch, terms(tis_cap=None))[0].item()


TWO = [*rows(2, run_id="short", advantage=1.0), *rows(6, run_id="long", advantage=-1.0)]


@pytest.mark.parametrize(("aggregation", "expected"), [("sequence", 0.0), ("token", 0.5), ("constant", 0.25)])
def test_ac_09_the_three_aggregations_differ_as_they_should(
    aggregation: Aggregation, expected: float
) -> None:
    assert loss(TWO, aggregation) == pytest.approx(expected, abs=1e-15)


def test_ac_13_the_constant_length_changes_the_loss() -> None:
    assert loss(TWO, "constant", length=16) == pytest.approx(0.125)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_ac_12_fully_masked_sequences_leave_the_denominator(aggregation: Aggregation) -> None:
    empty = to_samples(trajectory(turn(3, 0), run_id="empty"), 5.0)
    weights = token_weights([*TWO, *empty], aggregation)
    assert weights[:2] == token_weights(TWO, aggregation)
    assert loss([*TWO, *empty], aggregation) == loss(TWO, aggregation)
    assert token_weights(empty, aggregation) == [0.0]


def test_ac_14_rows_of_a_trajectory_do_not_change_its_weight() -> None:
    """Six trained tokens weigh the same in one row as in three, and so does the other trajectory."""
    for split in ([6], [3, 3], [1, 2, 3]):
        samples = [*rows(*split, run_id="a"), *rows(4, run_id="b")]
        weights = token_weights(samples, "sequence")
        shares = {"a": 0.0, "b": 0.0}
        for sample, weight in zip(samples, weights, strict=True):
            shares[sample.run_id] += weight * sample.num_action_tokens
        assert shares == pytest.approx({"a": 0.5, "b": 0.5})


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=6), st.data())
def test_weights_of_all_trained_tokens_sum_to_one(trajectories: list[list[int]], data: st.DataObject) -> None:
    aggregation: Aggregation = data.draw(st.sampled_from(["token", "sequence"]))
    samples = [s for i, counts in enumerate(trajectories) for s in rows(*counts, run_id=f"run-{i}")]
    weights = token_weights(samples, aggregation)
    total = math.fsum(w * s.num_action_tokens for w, s in zip(weights, samples, strict=True))
    assert total == pytest.approx(1.0 if any(map(sum, trajectories)) else 0.0)


def test_a_constant_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="constant_length=0 must be at least 1"):
        token_weights(TWO, "constant", constant_length=0)
