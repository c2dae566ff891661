"""Rollouts that ran out of tokens: which they are, and what a rollout loses for its length.

The soft punishment of DAPO (arXiv 2503.14476): nothing up to limit - buffer, then linearly down to -1 at the
limit. Left out: budgets of turns and of time, which cut an episode and no text.
"""

from __future__ import annotations

from nano_shared import Finish, StopReason, Trajectory


def cut_off(trajectory: Trajectory) -> bool:
    """Whether a token budget ended the rollout, by its stop reason or by the finish of its last call."""
    if trajectory.stop in (StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL):
        return True
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish == Finish.LENGTH


def length_penalty(trajectory: Trajectory, *, limit: int, buffer: int) -> float:
    """From 0 to -1, by the sampled tokens of the rollout; added to its reward."""
    sampled = sum(len(t.completion.tokens.sampled_ids) for t in trajectory.turns if t.completion.tokens)
    return -min(max(sampled - (limit - buffer), 0) / buffer, 1.0)
