"""N-gram speculative decoding: draft tokens are proposed from a table of n-grams seen in earlier rows.

A decoding step feeds a row's last token and its draft tokens, and samples a token after each of them. Draft
tokens are accepted up to the first that differs from the sampled one; the rest is discarded. Every token is
sampled with a random number of its own, so neither tokens nor log-probs depend on the draft. This is the
method of Leviathan et al. (arXiv 2211.17192) with an n-gram table as the draft model and exact-match
acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

CONTEXT = 3
"""length of the n-gram that predicts the next token"""
_LONGEST_DRAFT = 4
"""most draft tokens of one row"""
_STEP_TOKENS = 48
"""tokens a step, over all rows, below which one more is nearly free: loading the weights dominates"""
_MIN_ACCEPTANCE = 0.25
"""acceptance rate below which proposing stops"""
_HALF_LIFE = 64
"""draft tokens after which earlier acceptances count half in the acceptance rate"""
_RETRY_STEPS = 8
"""steps after which proposing is tried again while the acceptance rate is too low"""
_MAX_NGRAMS = 1 << 17
"""size of the n-gram table, some 20 MB; beyond it the table is cleared"""


class NGramSpeculator:
    """The n-gram table of all rows of one version of the weights. Depends on the observed tokens only."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._num_draft_tokens = 0.0
        self._num_accepted_tokens = 0.0
        self._steps = 0

    def observe(self, ids: Sequence[int]) -> None:
        """Add the n-grams of these tokens to the table."""
        if len(self._next) > _MAX_NGRAMS:
            self._next.clear()
        for at in range(CONTEXT, len(ids)):
            self._next[tuple(ids[at - CONTEXT : at])] = ids[at]

    def budget(self, rows: int) -> int:
        """Draft tokens that this step may propose for `rows` rows together."""
        self._steps += 1
        enabled = (
            self._num_accepted_tokens >= _MIN_ACCEPTANCE * self._num_draft_tokens
            or self._steps % _RETRY_STEPS == 0
        )
        return max(0, _STEP_TOKENS - rows) if enabled else 0

    def propose(self, tail: Sequence[int], longest: int) -> list[int]:
        """At most `longest` tokens that are likely to come after `tail`."""
        known = list(tail[-CONTEXT:])
        draft: list[int] = []
        while len(draft) < min(longest, _LONGEST_DRAFT):
            token = self._next.get(tuple(known))
            if token is None:
                break
            draft.append(token)
            known = [*known[1:], token]
        return draft

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Update the acceptance rate with the counts of one step."""
        fade = 0.5 ** (num_draft_tokens / _HALF_LIFE)
        self._num_draft_tokens = self._num_draft_tokens * fade + num_draft_tokens
        self._num_accepted_tokens = self._num_accepted_tokens * fade + num_accepted_tokens
