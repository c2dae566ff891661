"""Whether logged log-probs are a policy's: recomputes them with one forward pass over each token row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from nano_coder.verify.tokens import tokens_of
from nano_shared.types import Trajectory, Turn

if TYPE_CHECKING:
    from nano_coder.models.local.engine import Engine

MAX_GAP = 1e-4
"""nats; bound for any token, if the policy sampled in float32"""
MEAN_GAP = 0.05
"""bound for the mean relative gap of a run, if the policy sampled in bfloat16: over 384 runs of the shipped
policy the mean is 0.002 and the largest 0.036, over 20 chats that it finds unlikely 0.02 and 0.033"""
TURN_GAP = 0.1
"""bound for the mean relative gap of one turn, for any dtype: a turn that another policy wrote is nats away,
which a long run must not hide"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """|recomputed - recorded| over the sampled tokens of a run, nats."""

    tokens: int
    mean: float
    max: float
    relative_mean: float
    """where a recorded log-prob is below -1, its gap divided by it: rounding grows with what is rounded"""
    worst_turn: int
    """the turn with the largest relative mean"""
    worst_turn_mean: float
    """relative"""

    @property
    def exact(self) -> bool:
        """Whether the gap is within the bound for float32."""
        return self.max <= MAX_GAP

    @property
    def close(self) -> bool:
        """Whether the gap is within the bounds for bfloat16; False for NaN."""
        return self.relative_mean <= MEAN_GAP and self.worst_turn_mean <= TURN_GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A sampled token: its turn, and its log-prob as recorded and as recomputed, nats."""

    turn: int
    recorded: float
    recomputed: float
    entropy: float | None = None
    """of the distribution that it was drawn from, nats; None if it was not asked for"""

    @property
    def gap(self) -> float:
        return abs(self.recomputed - self.recorded)

    @property
    def relative_gap(self) -> float:
        return self.gap / max(1.0, -self.recorded)


def logprob_gap(run: Trajectory, engine: Engine) -> Gap:
    """The gap between the recorded log-probs and those of the engine's weights.

    Raises ValueError for a run without tokens.
    """
    return gap_of(rescored(run, engine))


def gap_of(tokens: Sequence[Scored]) -> Gap:
    """The gap of tokens that have been scored. Raises ValueError if there are none."""
    if not tokens:
        raise ValueError("no token was sampled, so no log-prob can differ")
    turns = groupby(tokens, key=lambda token: token.turn)
    means = {turn: _mean([token.relative_gap for token in group]) for turn, group in turns}
    every = [token.gap for token in tokens]
    worst = max(means, key=lambda turn: math.inf if math.isnan(means[turn]) else means[turn])
    return Gap(
        tokens=len(every), mean=_mean(every), max=math.nan if any(map(math.isnan, every)) else max(every),
        relative_mean=_mean([token.relative_gap for token in tokens]),
        worst_turn=worst, worst_turn_mean=means[worst],
    )  # fmt: skip


def rescored(run: Trajectory, engine: Engine, *, entropy: bool = False) -> list[Scored]:
    """Every sampled token of a run, row by row, scored by the engine's weights at its turn's temperature."""
    scored: list[Scored] = []
    by_row = sorted(run.turns, key=lambda turn: tokens_of(turn).row)
    for _, turns in groupby(by_row, key=lambda turn: tokens_of(turn).row):
        row: list[int] = []
        begins: list[tuple[Turn, int]] = []
        for turn in turns:
            tokens = tokens_of(turn)
            row += tokens.context_ids
            begins.append((turn, len(row)))
            row += tokens.sampled_ids
        temperatures = {turn.completion.sampling.temperature for turn, _ in begins}
        first = begins[0][1]
        scores = {t: engine.score_tokens(row, t, first=first, entropy=entropy) for t in temperatures}
        for turn, start in begins:
            of_turn = scores[turn.completion.sampling.temperature]
            scored += [
                Scored(
                    turn=turn.index, recorded=recorded, recomputed=of_turn[at - first].logprob,
                    entropy=of_turn[at - first].entropy,
                )
                for at, recorded in enumerate(tokens_of(turn).logprobs, start)
            ]  # fmt: skip
    return scored


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
