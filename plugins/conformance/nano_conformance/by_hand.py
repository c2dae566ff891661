"""A reference implementation: the loss of a step and its derivative by every log-prob, in loops over floats.

It uses no torch and no code of the losses that it checks. Rules are written as case distinctions, such as "a
token with positive advantage is bounded at 1 + high", and not as a minimum of clamped products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_conformance.case import LossCase

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    column: int
    new: float
    old: float
    behaviour: float
    reference: float
    advantage: float


def loss_by_hand(case: LossCase) -> tuple[float, list[list[float]]]:
    """(loss of a whole step, [B][T] its derivative by each log-prob), 0 on tokens that are not trained."""
    options, rows = case.options, rows_of(case)
    trained: dict[str, int] = {}
    for name, row in zip(options["trajectory"], rows, strict=True):
        trained[name] = trained.get(name, 0) + len(row)
    value, slopes = 0.0, [[0.0] * case.mask.shape[1] for _ in rows]
    for name, row, slope in zip(options["trajectory"], rows, slopes, strict=True):
        share = _share(options, own=trained[name], of=list(trained.values()))
        for loss, parts in _row(row, options):
            value += share * loss
            for token, along in parts:
                slope[token.column] += share * along
    return value, slopes


def rows_of(case: LossCase) -> list[list[Token]]:
    """The trained tokens of each row."""
    names = ("new", "old", "behaviour", "reference", "advantage")
    tensors = (case.logprobs, case.old, case.behaviour, case.reference, case.advantages)
    columns = dict(zip(names, (tensor.tolist() for tensor in tensors), strict=True))
    return [
        [Token(column=t, **{n: columns[n][b][t] for n in names}) for t, trained in enumerate(mask) if trained]
        for b, mask in enumerate(case.mask.tolist())
    ]


def _share(options: Options, *, own: int, of: Sequence[int]) -> float:
    """The share of a token under the aggregation."""
    if own == 0:
        return 0.0
    if options["aggregation"] == "token":
        return 1 / sum(of)
    trajectories = len([tokens for tokens in of if tokens > 0])
    length = own if options["aggregation"] == "sequence" else options["constant_length"]
    return 1 / trajectories / length


def _row(row: Sequence[Token], options: Options) -> list[tuple[float, list[tuple[Token, float]]]]:
    """[tokens] (loss, derivatives by the log-probs that it depends on)."""
    weights = _rejected(row, _weights(row, options), options)
    advantages = _charged(row, options)
    found = []
    for token, weight, advantage in zip(row, weights, advantages, strict=True):
        ratio, moves = _ratio(token, row, options)
        loss, along_ratio, along_itself = _surrogate(token.new, ratio, advantage, options)
        slopes = [(other, weight * along_ratio * move) for other, move in moves]
        slopes.append((token, weight * along_itself))
        loss *= weight
        if options["beta"] > 0 and options["kl_in"] == "loss":
            kl, steep = divergence(token.new - token.reference, options["kl"])
            loss += options["beta"] * kl
            slopes.append((token, options["beta"] * steep))
        found.append((loss, slopes))
    return found


def _ratio(token: Token, row: Sequence[Token], options: Options) -> tuple[float, list[tuple[Token, float]]]:
    """The ratio of the token, or of its row, and its derivative by each log-prob."""
    if options["ratio"] == "token":
        ratio = math.exp(token.new - token.old)
        return ratio, [(token, ratio)]
    ratio = math.exp(sum(t.new - t.old for t in row) / len(row))
    return ratio, [(t, ratio / len(row)) for t in row]


def _surrogate(new: float, ratio: float, advantage: float, options: Options) -> tuple[float, float, float]:
    """(loss, derivative by the ratio, derivative by the token's own log-prob)."""
    low, high, dual = 1 - options["clip_low"], 1 + options["clip_high"], options["dual_clip"]
    if options["objective"] in ("reinforce", "rloo"):
        return -advantage * new, 0.0, -advantage
    if options["objective"] == "cispo":
        bounded = low if ratio < low else high if ratio > high else ratio
        return -bounded * advantage * new, 0.0, -bounded * advantage
    if advantage > 0 and ratio > high:
        return -advantage * high, 0.0, 0.0
    if advantage < 0 and ratio < low:
        return -advantage * low, 0.0, 0.0
    if advantage < 0 and dual is not None and ratio > dual:
        return -advantage * dual, 0.0, 0.0
    return -advantage * ratio, -advantage, 0.0


def _weights(row: Sequence[Token], options: Options) -> list[float]:
    """[tokens] importance weights, old / behaviour, truncated or masked."""
    cap = options["tis_cap"]
    if cap is None:
        return [1.0] * len(row)
    gaps = [t.old - t.behaviour for t in row]
    if options["tis_level"] == "sequence":
        gaps = [sum(gaps)] * len(row)
    raw = [math.exp(gap) for gap in gaps]
    if options["tis_mode"] == "truncate":
        return [cap if w > cap else w for w in raw]
    return [0.0 if w > cap or w < options["tis_floor"] else w for w in raw]


def _rejected(row: Sequence[Token], weights: list[float], options: Options) -> list[float]:
    """The weights, or zeros for a row with a negative mean advantage and a drift above `reject_drift`."""
    if options["reject_drift"] is None or not row:
        return weights
    drift = sum(t.behaviour - t.new for t in row) / len(row)
    poor = sum(t.advantage for t in row) < 0
    return [0.0] * len(row) if poor and drift > options["reject_drift"] else weights


def _charged(row: Sequence[Token], options: Options) -> list[float]:
    """Advantages minus the KL of each token and of all later ones in its row, under kl_in = reward."""
    charged = [t.advantage for t in row]
    if options["beta"] == 0 or options["kl_in"] != "reward":
        return charged
    following = 0.0
    for place in range(len(row) - 1, -1, -1):
        following += divergence(row[place].old - row[place].reference, options["kl"])[0]
        charged[place] -= options["beta"] * following
    return charged


def divergence(gap: float, kind: str) -> tuple[float, float]:
    """(estimate of the KL, its derivative) from log-prob minus reference log-prob of one token."""
    if kind == "k1":
        return gap, 1.0
    if kind == "k2":
        return gap * gap / 2, gap
    value = math.exp(-gap) - 1 + gap
    return value, gap if kind == "k3+" else 1 - math.exp(-gap)


def advantages_by_hand(rewards: Sequence[float | None], baseline: str, std: str) -> list[float]:
    """Advantages of one group; a missing reward gets 0 and is not counted."""
    scored = [r for r in rewards if r is not None]
    if baseline == "none":
        return [0.0 if r is None else r for r in rewards]
    if not scored or min(scored) == max(scored):
        return [0.0] * len(rewards)
    mean = sum(scored) / len(scored)
    spread = sum((r - mean) ** 2 for r in scored) / (len(scored) - (1 if std == "sample" else 0))
    scale = 1.0 if std == "none" else math.sqrt(spread)
    # the mean of the others is farther away by this factor
    farther = len(scored) / (len(scored) - 1) if baseline == "rloo" else 1.0
    return [0.0 if r is None else farther * (r - mean) / scale for r in rewards]
