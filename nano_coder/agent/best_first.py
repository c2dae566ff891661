"""The likeliest answers to one prompt, one after another: best-first over the tokens at which they part."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from nano_shared.policy import Beginning, Likeliest
from nano_shared.types import TurnTokens


def next_beginning(
    answers: Sequence[tuple[TurnTokens, Sequence[Likeliest]]], eos_ids: Collection[int]
) -> Beginning | None:
    """The likeliest beginning that none of the greedy answers has; empty before the first one, None where
    nothing is left.

    Each answer comes with the likeliest tokens of each position behind its own beginning. The answers have to
    be those to the beginnings that this function gave, in order: they part the set of all texts, as in
    Lawler, "A procedure for computing the k best solutions" (Management Science 18, 1972). The order is that
    of the beginnings: what follows one greedily may be less likely than what follows a later one.
    """
    heap: list[tuple[float, int, Beginning]] = [(0.0, 0, ())]
    for tokens, places in answers:
        _, _, begun = heapq.heappop(heap)
        path = tuple(zip(tokens.sampled_ids, tokens.logprobs, strict=True))
        cost = -sum(logprob for _, logprob in begun)
        for at, ((token, logprob), likeliest) in enumerate(
            zip(path[len(begun) :], places, strict=False), len(begun)
        ):
            for other, its in likeliest:
                if other != token and not (other in eos_ids and token in eos_ids):
                    heapq.heappush(heap, (cost - its, len(heap), (*path[:at], (other, its))))
            cost -= logprob
        if not heap:
            return None
    return heap[0][2]
