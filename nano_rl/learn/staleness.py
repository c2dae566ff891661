"""What is left of logged runs once their importance weights are known.

    w = p(token) / behaviour(token)        ess = (sum w)^2 / (n sum w^2)        over n tokens

The effective sample size says which share of the tokens carries the estimate (Kish 1965). Runs that the
policy has moved away from have weights far from 1, a few of which outweigh all the others. The runs that are
farthest, by the mean of |log w| over their tokens (their drift), leave the step until the ess of those that
stay is at least the bound. All leave that have drifted too far: where the policy says what no log holds, most
weights are near 0 and alike, and the ess does not show it. What stays is truncated token by token
(`objectives/importance.py`). Leaving by distance biases the gradient toward what the policy still does; the
bounds say how much is left to correct.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nano_rl.learn.model.logprob import token_logprobs
from nano_rl.learn.objectives.ratio import clamped_exp
from nano_rl.learn.rows.batch import make_batches
from nano_rl.learn.rows.sample import TrainSample


def aged(samples: Sequence[TrainSample], born: Mapping[str, int]) -> list[TrainSample]:
    """The samples with no token younger than its run is known to be (`lineage.py`)."""
    return [
        replace(s, versions=tuple(min(v, born[s.run_id]) for v in s.versions)) if s.run_id in born else s
        for s in samples
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which runs stay under the bound."""

    gone: frozenset[str]
    ess_before: float
    drift: float
    """mean |log weight| of the logged runs, nats a token"""
    ess: float
    """of the logged tokens that stay; 1 where none do"""

    @property
    def metrics(self) -> dict[str, float]:
        """`ess_logged` over all logged tokens, `ess_kept` over those that stay, `weight_dropped` runs,
        and `drift_logged`."""
        return {
            "ess_logged": self.ess_before,
            "ess_kept": self.ess,
            "weight_dropped": float(len(self.gone)),
            "drift_logged": self.drift,
        }


def within_ess(
    model: nn.Module,
    samples: Sequence[TrainSample],
    logged: Collection[str],
    bound: float,
    *,
    drift: float | None = None,
    max_tokens: int,
    trees: bool,
) -> Kept | None:
    """Score the rows of logged runs under the weights as they are; None where there is none of them."""
    rows = [s for s in samples if s.run_id in logged and s.num_action_tokens]
    if not rows:
        return None
    mismatch_of: dict[str, list[Tensor]] = defaultdict(list)
    named = [replace(row, key=str(place)) for place, row in enumerate(rows)]
    with torch.no_grad():
        for batch in make_batches(named, max_tokens=max_tokens, trees=trees):
            mismatch_BT = (token_logprobs(model, batch) - batch.behaviour_logprobs_BT).double()
            for place, values_T, mask_T in zip(batch.keys, mismatch_BT, batch.mask_BT, strict=True):
                mismatch_of[rows[int(place)].run_id].append(values_T[mask_T].cpu())
    return keep_nearest({run: torch.cat(parts) for run, parts in mismatch_of.items()}, bound, drift)


def keep_nearest(mismatch_of: Mapping[str, Tensor], bound: float, drift: float | None = None) -> Kept:
    """The most runs, nearest first, whose tokens together have an ess of at least `bound`, none of which has
    drifted by more than `drift`.

    `mismatch_of` is [N] policy - behaviour, nats, of the tokens of each run.
    """
    drifts = {run: float(values_N.abs().mean()) for run, values_N in mismatch_of.items()}
    nearest = sorted(drifts, key=lambda run: (drifts[run], run))
    near = sum(drift is None or value <= drift for value in drifts.values())
    weights = [clamped_exp(mismatch_of[run].double()) for run in nearest]
    count = torch.tensor([len(w) for w in weights], dtype=torch.float64).cumsum(0)
    total = torch.stack([w.sum() for w in weights]).cumsum(0)
    squared = torch.stack([w.square().sum() for w in weights]).cumsum(0)
    ess = (total.square() / (count * squared)).tolist()
    kept = max((place for place, value in enumerate(ess[:near], start=1) if value >= bound), default=0)
    return Kept(
        gone=frozenset(nearest[kept:]),
        ess_before=ess[-1],
        drift=sum(drifts.values()) / len(drifts),
        ess=ess[kept - 1] if kept else 1.0,
    )
