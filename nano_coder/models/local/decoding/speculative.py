"""Drafts: what came after the same few tokens before is likely to come again.

A row's draft is read together with its last token, and a token is drawn behind each. As long as what is drawn
is what was drafted, the next one holds too; the rest is thrown away. Each token is drawn with a random number
of its own, so what a row says does not depend on the draft, and its log-probs are those of what it says: the
speculative decoding of arXiv 2211.17192, with a table for the small model and one random number for the two
that decide there.
"""

from __future__ import annotations

from collections.abc import Sequence

CONTEXT = 3
"""tokens that a guess goes by"""
_LONGEST = 4
"""tokens of one draft"""
_BATCH = 48
"""tokens of a step up to which more of them cost little: it reads all weights in any case"""
_WORTH = 0.25
"""share of drafted tokens that must hold for drafts to be worth their time"""
_MEMORY = 64
"""drafted tokens after which what held before counts half"""
_LOOK = 8
"""steps after which drafts that were not worth it are tried again"""
_MOST = 1 << 17
"""guesses that are kept, some 20 MB; beyond it they begin anew"""


class Drafts:
    """Guesses from all rows of one version of the weights. They depend on the tokens seen alone."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._drafted = 0.0
        self._held = 0.0
        self._steps = 0

    def note(self, ids: Sequence[int]) -> None:
        """Each of these tokens came after the three before it."""
        if len(self._next) > _MOST:
            self._next.clear()
        for at in range(CONTEXT, len(ids)):
            self._next[tuple(ids[at - CONTEXT : at])] = ids[at]

    def room(self, rows: int) -> int:
        """Tokens that this step may draft for so many rows."""
        self._steps += 1
        worth = self._held >= _WORTH * self._drafted or self._steps % _LOOK == 0
        return max(0, _BATCH - rows) if worth else 0

    def guess(self, tail: Sequence[int], longest: int) -> list[int]:
        """[0 to `longest`] what is likely to come after these tokens."""
        known = list(tail[-CONTEXT:])
        draft: list[int] = []
        while len(draft) < min(longest, _LONGEST):
            token = self._next.get(tuple(known))
            if token is None:
                break
            draft.append(token)
            known = [*known[1:], token]
        return draft

    def told(self, drafted: int, held: int) -> None:
        """So many drafted tokens were tried in a step, and so many of them held."""
        fade = 0.5 ** (drafted / _MEMORY)
        self._drafted = self._drafted * fade + drafted
        self._held = self._held * fade + held
