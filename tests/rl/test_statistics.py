"""Intervals against published numbers, exact enumeration, and their edges."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.paired import paired_bootstrap
from nano_rl.checkpoints.evaluate import bootstrap, sign_flip, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_equals_the_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(n=st.integers(1, 500), data=st.data())
def test_wilson_holds_the_rate_inside_the_unit_interval(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    mirrored = wilson(n - successes, n)
    assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]))


def test_wilson_knows_nothing_before_the_first_try() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        wilson(successes, n)


def test_bootstrap_is_deterministic_in_its_seed() -> None:
    a, b = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0] * 6
    assert paired_bootstrap(a, b, 7) == paired_bootstrap(a, b, 7)
    assert paired_bootstrap(a, b, 7) != paired_bootstrap([x + 0.5 for x in a], b, 7)


def test_bootstrap_of_a_constant_difference_has_no_width() -> None:
    assert paired_bootstrap([1.0, 2.0, 3.0], [0.5, 1.5, 2.5], 0) == (0.5, 0.5, 0.5)


def test_bootstrap_equals_the_enumeration_of_all_resamples() -> None:
    differences = [0.0, 1.0, 2.0, 5.0, 9.0]
    exact = sorted(sum(s) / 5 for s in itertools.product(differences, repeat=5))
    mean, low, high = paired_bootstrap(differences, [0.0] * 5, 1, resamples=20_000)
    assert mean == pytest.approx(3.4)
    assert low == pytest.approx(exact[int(0.025 * len(exact))], abs=0.2)
    assert high == pytest.approx(exact[math.ceil(0.975 * len(exact)) - 1], abs=0.2)


def test_bootstrap_uses_the_pairing() -> None:
    hard_to_easy = [float(i) for i in range(20)]
    mean, low, high = paired_bootstrap(
        [x + 0.1 * (i % 2) for i, x in enumerate(hard_to_easy)], hard_to_easy, 0
    )
    assert mean == pytest.approx(0.05)
    assert 0 < low < mean < high < 0.1


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_bootstrap_refuses_what_does_not_pair(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="pair up"):
        paired_bootstrap(a, b, 0)


def test_clusters_are_drawn_whole() -> None:
    """Four programs, one of which many tasks ask for: exact, over all 4^4 draws of programs."""
    clusters = [[1.0] * 7, [0.0], [1.0, 0.0], [0.0]]
    exact = sorted(
        sum(map(sum, drawn)) / sum(map(len, drawn)) for drawn in itertools.product(clusters, repeat=4)
    )
    mean, low, high = bootstrap(clusters, 0, resamples=20_000)
    assert mean == pytest.approx(8 / 11)
    assert low == pytest.approx(exact[int(0.025 * len(exact))], abs=0.02)
    assert high == pytest.approx(exact[math.ceil(0.975 * len(exact)) - 1], abs=0.02)
    alone = paired_bootstrap([x for values in clusters for x in values], [0.0] * 11, 0)
    assert high - low > alone[2] - alone[1]  # what takes eleven tasks for independent is too sure


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5]), min_size=1, max_size=20), st.integers(0, 9))
def test_a_cluster_of_one_task_is_a_task(differences: list[float], seed: int) -> None:
    nothing = [0.0] * len(differences)
    names = [str(place) for place in range(len(differences))]
    assert paired_bootstrap(differences, nothing, seed, clusters=names, resamples=200) == paired_bootstrap(
        differences, nothing, seed, resamples=200
    )


def test_sign_flip_equals_the_enumeration_of_all_signs() -> None:
    differences = [1.0, 1.0, 0.5, -0.5, 1.0, 0.0, 1.0]
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [sum(s * x for s, x in zip(sign, differences, strict=True)) for sign in signs]
    exact = sum(value >= sum(differences) for value in sums) / len(sums)
    alone = [[x] for x in differences]
    assert sign_flip(alone) == pytest.approx(exact, abs=1e-12)
    assert sign_flip([[1.0]] * 40) == pytest.approx(2**-40), "small levels need small p-values"
    assert sign_flip([[x * 0.3710914] for x in differences]) == pytest.approx(exact, abs=0.01)


def test_six_of_six_are_beyond_noise_and_five_are_not() -> None:
    assert sign_flip([[1.0]] * 6) < 0.025 < sign_flip([[1.0]] * 5)
    assert sign_flip([[0.0]] * 9) == 1
    assert sign_flip([[1.0] * 6]) > 0.4  # six tasks of one program are one stroke of luck
