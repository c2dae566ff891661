"""Intervals for tables of results: Wilson's for a rate, the paired bootstrap for a difference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

Z95 = 1.959963984540054
"""two-sided 95 % quantile of the normal distribution"""


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a success rate (Wilson 1927); (0, 1) where nothing was tried.

    Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie between 0 and n={n}")
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, Z95**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # at the ends the bound is exactly 0 or 1, and rounding must not move it past the rate
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def bootstrap(values: Sequence[float], seed: int, *, resamples: int = 4000) -> tuple[float, float, float]:
    """The mean and its 95 % percentile interval (Efron and Tibshirani 1993, ch. 13), deterministic in `seed`.

    Raises ValueError where there are no values.
    """
    if not values:
        raise ValueError("there is nothing to resample")
    n = len(values)
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(values, k=n)) / n for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[math.ceil(0.975 * resamples) - 1]
    return math.fsum(values) / n, low, high


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], seed: int, *, resamples: int = 4000
) -> tuple[float, float, float]:
    """Mean of a - b over paired tasks, and its 95 % percentile interval.

    Deterministic in `seed`. Raises ValueError when the sequences are empty or of different lengths.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"a and b must pair up and not be empty, but have lengths {len(a)} and {len(b)}")
    return bootstrap([x - y for x, y in zip(a, b, strict=True)], seed, resamples=resamples)


def sign_flip(differences: Sequence[float], seed: int, *, flips: int = 10_000) -> float:
    """One-sided p-value of a mean this far above 0 if each difference were as likely to have the other sign
    (Fisher's randomisation test), by `flips` draws; deterministic in `seed`. 1 where nothing differs.
    """
    changed = [x for x in differences if x]
    if not changed:
        return 1.0
    observed = math.fsum(changed) - 1e-9
    rng = random.Random(seed)
    reached = sum(
        sum(x if (signs >> i) & 1 else -x for i, x in enumerate(changed)) >= observed
        for signs in (rng.getrandbits(len(changed)) for _ in range(flips))
    )
    return (reached + 1) / (flips + 1)
