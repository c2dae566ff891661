"""What some weights say of logged tokens: entropy, and the importance ratio or the mismatch."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.verify.tokens import Scored, rescored
from nano_shared.types import Trajectory
from nano_view.answers import TokenColumns

_KEPT = 32


class TokenScorer:
    """TokenColumns runs by these weights, one at a time, and keeps the last ones."""

    def __init__(self, opened: OpenedWeights) -> None:
        self._policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        self._sampler = (opened.loaded.id, opened.version)
        weights: Any = opened.loaded.model
        self._vocabulary = int(weights.get_input_embeddings().num_embeddings)
        self._found: OrderedDict[tuple[str, int], TokenColumns] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: Trajectory) -> TokenColumns:
        """`entropy`, and `mismatch` (nats) where these weights sampled the run, else `ratio`. Empty for a run
        without tokens, with ids that these weights do not have, or that is too long for them."""
        if not self._can_read(run):
            return {}
        key = (run.id, len(run.turns))
        with self._lock:
            if key not in self._found:
                done = [turn.completion for turn in run.own_turns]
                own = all((each.policy_id, each.policy_version) == self._sampler for each in done)
                tokens = rescored(run, self._policy.engine, entropy=True)
                by_turn = groupby(tokens, key=lambda token: token.turn)
                self._found[key] = {turn: _columns(list(found), own) for turn, found in by_turn}
            self._found.move_to_end(key)
            while len(self._found) > _KEPT:
                self._found.popitem(last=False)
            return self._found[key]

    def _can_read(self, run: Trajectory) -> bool:
        tokens = [turn.completion.tokens for turn in run.turns if turn.completion.tokens is not None]
        known = all(max((*t.context_ids, *t.sampled_ids), default=0) < self._vocabulary for t in tokens)
        length = sum(len(t.context_ids) + len(t.sampled_ids) for t in tokens)
        return run.has_tokens and known and length <= self._policy.context_limit


def _columns(tokens: Sequence[Scored], own: bool) -> dict[str, list[float]]:
    far = [token.recorded - token.recomputed for token in tokens]
    compared = {"mismatch": far} if own else {"ratio": [math.exp(min(-gap, 50.0)) for gap in far]}
    return {"entropy": [token.entropy or 0.0 for token in tokens], **compared}
