"""Effective sample size: how many fresh tokens a stale log is worth, from its importance weights.

    n_eff / n = (sum w)^2 / (n sum w^2),   w = p_now / p_then        (Kish 1965)

of single tokens, as the training's metric `ess`, and of whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nano_coder.runtime import Scored
from nano_rl.objectives.ratio import MAX_LOG_RATIO


def share(log_weights: Sequence[float]) -> float:
    """In (0, 1]; the logarithms are shifted by their largest, so that none overflows. 0 of nothing."""
    if not log_weights:
        return 0.0
    top = max(log_weights)
    weights = [math.exp(value - top) for value in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


@dataclass(slots=True)
class EffectiveSample:
    """Adds up run by run, in constant memory for the tokens."""

    runs: list[float] = field(default_factory=list)
    """log-weight of each run"""
    tokens: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, tokens: Iterable[Scored]) -> None:
        logs = [min(MAX_LOG_RATIO, max(-MAX_LOG_RATIO, t.recomputed - t.recorded)) for t in tokens]
        self.tokens += len(logs)
        self._sum += math.fsum(map(math.exp, logs))
        self._squares += math.fsum(math.exp(2 * value) for value in logs)
        self.runs.append(math.fsum(logs))

    @property
    def token_share(self) -> float:
        return self._sum**2 / (self.tokens * self._squares) if self.tokens else 0.0

    @property
    def run_share(self) -> float:
        return share(self.runs)
