"""Statistics of results: Wilson intervals, cluster bootstrap, and sign-flip tests.

Correlated values, such as tasks of one program, form a cluster, and whole clusters are resampled; otherwise
intervals are too narrow (Miller 2024, arXiv 2411.00640, section 2.2).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

Z95 = 1.959963984540054
"""two-sided 95 % quantile of the normal distribution"""


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a success rate (Wilson 1927); (0, 1) for n = 0.

    Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie between 0 and n={n}")
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, Z95**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # exact at 0 and n: rounding must not move the bound past the rate
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def bootstrap(
    clusters: Sequence[Sequence[float]], seed: int, *, resamples: int = 4000
) -> tuple[float, float, float]:
    """(mean of all values, low, high): the 95 % percentile interval (Efron and Tibshirani 1993, ch. 13) by
    resampling whole clusters; deterministic in `seed`.

    Raises ValueError if there are no values.
    """
    sized = [(math.fsum(values), len(values)) for values in clusters if values]
    if not sized:
        raise ValueError("there is nothing to resample")
    rng = random.Random(seed)
    means = sorted(_mean(rng.choices(sized, k=len(sized))) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[math.ceil(0.975 * resamples) - 1]
    return _mean(sized), low, high


def _mean(sized: Sequence[tuple[float, int]]) -> float:
    return math.fsum(total for total, _ in sized) / sum(n for _, n in sized)


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    seed: int,
    *,
    clusters: Sequence[str] | None = None,
    resamples: int = 4000,
) -> tuple[float, float, float]:
    """(mean of a - b over paired tasks, low, high), a 95 % percentile interval.

    `clusters` names the cluster of each task; None makes each task its own. Deterministic in `seed`. Raises
    ValueError if the sequences are empty or differ in length.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"a and b must pair up and not be empty, but have lengths {len(a)} and {len(b)}")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    names = clusters if clusters is not None else list(map(str, range(len(a))))
    return bootstrap(by_cluster(zip(names, differences, strict=True)), seed, resamples=resamples)


def by_cluster(named: Iterable[tuple[str, float]]) -> list[list[float]]:
    """The values of each cluster, in the order of first appearance."""
    clusters: dict[str, list[float]] = {}
    for name, value in named:
        clusters.setdefault(name, []).append(value)
    return list(clusters.values())


def sign_flip(clusters: Sequence[Sequence[float]], seed: int, *, flips: int = 10_000) -> float:
    """One-sided p-value of a mean above 0 by Fisher's randomisation test: the signs of the cluster sums are
    flipped at random, `flips` times. Deterministic in `seed`; 1 if all values are 0.
    """
    changed = [total for values in clusters if (total := math.fsum(values))]
    if not changed:
        return 1.0
    observed = math.fsum(changed) - 1e-9
    rng = random.Random(seed)
    reached = sum(
        sum(x if (signs >> i) & 1 else -x for i, x in enumerate(changed)) >= observed
        for signs in (rng.getrandbits(len(changed)) for _ in range(flips))
    )
    return (reached + 1) / (flips + 1)
