"""Whether a server serves an adapter: its card, its log-probs of a fixed row, and what it samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_coder.models.endpoint.model_card import ModelCard
from nano_coder.models.endpoint.token_server import InvalidAnswer, ServerUnavailable, TokenServer
from nano_rl.learn.config import GuardConfig
from nano_rl.learn.guards import mismatch_bound
from nano_shared.types import Sampling

SAMPLED = 8
"""tokens that a probe samples"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """An adapter under its content name, and the trainer's log-probs under it."""

    name: str
    folder: Path
    content: str
    """`folder_content`"""
    version: int
    """policy version"""
    row: tuple[int, ...]
    """[L] the probe's ids"""
    expected: tuple[float, ...]
    """[L - 1] the trainer's log-probs of `row[1:]` under this adapter, temperature 1, nats"""
    previous: tuple[float, ...] | None = None
    """those under the adapter before"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterProbe:
    """Holds a server against the trainer."""

    eos_ids: frozenset[int]
    vocab_size: int
    guards: GuardConfig
    bfloat16: bool

    def check_card(self, server: TokenServer, adapter: PublishedAdapter) -> ModelCard:
        """Load the adapter where it is not, and compare what the server says of it. Returns the card of
        the served base. Raises as `TokenServer`."""
        cards = server.cards()
        if adapter.name not in cards:
            refused = None
            try:
                server.load(adapter.name, str(adapter.folder))
            except ServerUnavailable as problem:
                refused = problem
            cards = server.cards()
            if refused and adapter.name not in cards:  # another training may have loaded the same
                raise refused
        card = cards.get(adapter.name)
        if card is None:
            raise InvalidAnswer(f"{server.url} loaded {adapter.name} and does not list it")
        wrong = (
            Path(card.root).name != adapter.name if card.content is None else card.content != adapter.content
        )
        if wrong:
            raise InvalidAnswer(f"{server.url} holds other files under the name {adapter.name}")
        return next(iter(cards.values()))

    def gaps(
        self, server: TokenServer, adapter: PublishedAdapter, deadline: float
    ) -> tuple[list[float], str]:
        """Relative gap of the log-probs of server and trainer for each token of the row, and the server's
        name for the weights. Raises InvalidAnswer beyond the bound, and where the log-probs are rather those
        of the adapter before."""
        served = server.score(adapter.name, adapter.row, deadline=deadline)
        gaps = _gaps(served, adapter.expected)
        self._refuse(server, gaps, f"log-probs of a fixed row under {adapter.name}")
        # an update may move log-probs by less than the bound: rather the last weights than these is stale
        if adapter.previous and _mean(gaps) > 2 * _mean(_gaps(served, adapter.previous)):
            raise InvalidAnswer(
                f"{server.url} serves the weights before {adapter.name} under that name: its log-probs of a"
                f" fixed row are {_mean(gaps):.2g} from the trainer's, and nearer to the last version's"
            )
        sampling = Sampling(max_tokens=SAMPLED)
        sampled = server.sample(
            adapter.name, adapter.row, sampling, eos_ids=self.eos_ids, vocab_size=self.vocab_size,
            deadline=deadline,
        )  # fmt: skip
        again = server.score(adapter.name, (*adapter.row, *sampled.ids), deadline=deadline)
        again = again[len(adapter.row) - 1 :]
        self._refuse(server, _gaps(sampled.logprobs, again), "log-probs of what it sampled and then scored")
        return gaps, sampled.fingerprint

    def _refuse(self, server: TokenServer, gaps: Sequence[float], what: str) -> None:
        gap, bound = (_mean if self.bfloat16 else max)(gaps), mismatch_bound(self.guards, self.bfloat16)
        if not gap <= bound:  # NaN too
            raise InvalidAnswer(
                f"{server.url}: {what} differ by {gap:.3g}, more than guards.mismatch_max = {bound:g}: other"
                " weights, another base model, or another dtype (nano-coder serve --dtype, vLLM --dtype)"
            )


def _gaps(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
