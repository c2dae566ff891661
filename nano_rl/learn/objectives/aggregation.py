"""Aggregation: what each trained token weighs in the loss, fixed for the whole step before it is cut.

    token      1 / trained tokens of the step                       DAPO (arXiv 2503.14476)
    sequence   1 / (trajectories x trained tokens of its own)       GRPO (arXiv 2402.03300)
    constant   1 / (trajectories x a constant length)               Dr. GRPO (arXiv 2503.20783)

A trajectory of several token rows counts once: its rows share one length, so that a fork or a rewritten
history changes nothing of what the trajectory weighs. A trajectory without a trained token counts nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nano_rl.learn.config.objective import Aggregation
from nano_rl.learn.rows.sample import TrainSample


def token_weights(
    samples: Sequence[TrainSample], aggregation: Aggregation = "token", *, constant_length: int = 1
) -> list[float]:
    """[S] the weight of every trained token of each sample; `samples` are all those of the step.

    The loss is the sum over trained tokens of weight times token loss. Under `token` and `sequence` the
    weights of all trained tokens sum to 1. Samples of one trajectory are told by their `run_id`.

    Raises ValueError when `constant_length` is below 1.
    """
    if constant_length < 1:
        raise ValueError(f"constant_length={constant_length} must be at least 1")
    tokens_of: Counter[str] = Counter()
    for sample in samples:
        tokens_of[sample.run_id] += sample.num_action_tokens
    tokens, trajectories = tokens_of.total(), sum(count > 0 for count in tokens_of.values())
    return [
        token_share(
            aggregation, own=tokens_of[s.run_id], tokens=tokens, trajectories=trajectories,
            constant_length=constant_length,
        )
        for s in samples
    ]  # fmt: skip


def token_share(
    aggregation: Aggregation, *, own: int, tokens: int, trajectories: int, constant_length: int
) -> float:
    """What a token weighs whose trajectory has `own` of the step's trained `tokens`."""
    if own == 0:
        return 0.0
    if aggregation == "token":
        return 1 / tokens
    return 1 / (trajectories * (constant_length if aggregation == "constant" else own))
