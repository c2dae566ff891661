"""The gate: no shaping lifts a failure above a pass, whatever the weights, the scores and the settings."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_preferences.composed import Gate, smallest_step
from nano_rl.learn.advantages import summed_advantages
from nano_rl.rewards.reward import TESTS

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SHAPING = ("process", "length", "judge")
scores = st.fixed_dictionaries({name: st.none() | st.floats(0, 1) for name in SHAPING})
spoken = st.fixed_dictionaries({name: st.floats(0, 1) for name in SHAPING})
weights = st.fixed_dictionaries(
    {TESTS: st.floats(1e-3, 100), **{name: st.floats(0, 100) for name in SHAPING}}
)
outcomes = st.sampled_from([i / 10 for i in range(11)])


@unhurried
@given(weights)
def test_weights_are_scaled_to_a_sum_of_one(given_weights: dict[str, float]) -> None:
    assert math.fsum(Gate.of(given_weights).weights.values()) == pytest.approx(1)


@pytest.mark.parametrize("bad", [{"tests": 0.0}, {"tests": math.inf}, {"tests": -1.0, "process": 3.0}])
def test_weights_without_a_positive_finite_sum_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights must be at least 0"):
        Gate.of(bad)


@unhurried
@given(weights, st.floats(0, 0.99), scores, scores)
def test_no_shaping_lifts_a_failure_above_a_pass(
    w: dict[str, float], tie: float, best: dict[str, float | None], worst: dict[str, float | None]
) -> None:
    gate = Gate.of(w, tie_break=tie)
    fail = gate.total(gate.counted(0.0, best))
    passed = gate.total(gate.counted(1.0, worst))
    assert 0 <= fail < passed <= 1 + 1e-12


@unhurried
@given(
    weights,
    st.floats(0, 0.99),
    st.sampled_from([0.3, 0.7, 1.0]),
    st.lists(st.tuples(outcomes, scores), min_size=2),
)
def test_below_the_gate_the_order_of_outcomes_is_kept_and_a_pass_stays_above(
    w: dict[str, float], tie: float, threshold: float, runs: list[tuple[float, dict[str, float | None]]]
) -> None:
    gate = Gate.of(w, threshold=threshold, tie_break=tie)
    step = smallest_step(o for o, _ in runs)
    ranked = [(o, gate.total(gate.counted(o, s, step=step))) for o, s in runs]
    for o1, r1 in ranked:
        for o2, r2 in ranked:
            if o1 < o2 and o1 < threshold:
                assert r1 < r2


@unhurried
@given(weights, scores)
def test_without_a_tie_break_a_failure_earns_nothing_at_all(
    w: dict[str, float], s: dict[str, float | None]
) -> None:
    gate = Gate.of(w)
    assert gate.total(gate.counted(0.0, s)) == 0


@unhurried
@given(scores)
def test_a_weight_of_zero_counts_nothing(s: dict[str, float | None]) -> None:
    gate = Gate.of({TESTS: 1.0, **dict.fromkeys(SHAPING, 0.0)})
    assert gate.total(gate.counted(1.0, s)) == 1.0


def test_a_part_that_says_nothing_counts_half() -> None:
    gate = Gate.of({TESTS: 1.0, "judge": 1.0})
    assert gate.total(gate.counted(1.0, {"judge": None})) == 0.75


def test_a_tie_break_moves_a_failure_by_less_than_a_step() -> None:
    gate = Gate.of({TESTS: 1.0, "process": 1.0}, tie_break=0.5)
    assert gate.total(gate.counted(0.0, {"process": 1.0}, step=0.1)) == pytest.approx(0.5 * 0.1 * 0.5)
    assert smallest_step([0.0, 0.25, 1.0]) == 0.25
    assert smallest_step([None, 0.0]) == 1.0


def test_without_tests_there_is_no_gate() -> None:
    gate = Gate.of({"judge": 2.0})
    assert gate.total(gate.counted(None, {"judge": 0.25})) == 0.25


@unhurried
@given(
    weights,
    st.sampled_from(["mean", "rloo"]),
    st.sampled_from(["sample", "population"]),
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), spoken), min_size=2, max_size=8),
)
def test_parts_normalised_apart_keep_every_pass_above_every_failure(
    w: dict[str, float], baseline: str, std: str, runs: list[tuple[float, dict[str, float]]]
) -> None:
    gate = Gate.of(w)
    counted = [gate.counted(o, s) for o, s in runs]
    objectives = [(weight, [c[name] for c in counted]) for name, weight in gate.weights.items()]
    advantages = summed_advantages(objectives, baseline=baseline, std=std)  # type: ignore[arg-type]
    passes = [a for a, (o, _) in zip(advantages, runs, strict=True) if o == 1]
    fails = [a for a, (o, _) in zip(advantages, runs, strict=True) if o == 0]
    if passes and fails:
        assert min(passes) > max(fails)
