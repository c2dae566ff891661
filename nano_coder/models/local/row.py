"""Requests, and rows: the tokens of one request from its prompt to its completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nano_coder.models.local.sampler import likeliest, uniforms
from nano_shared import ContextFull, Finish, Sampling, UsageError
from nano_shared.policy import DecodeIds

if TYPE_CHECKING:
    from torch import Tensor

    from nano_coder.models.local.constraint import Constraint

Likeliest = tuple[tuple[int, float], ...]
"""the likeliest tokens of a place, likeliest first, with their log-probs"""
OnToken = Callable[[int, float, Likeliest], bool]
"""token id, its log-prob, and the likeliest tokens if asked for -> whether to go on"""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    ids: tuple[int, ...]
    """[L] all tokens so far"""
    sampling: Sampling
    seed: int | None = None
    """None: a seed from the operating system"""
    owner: int | None = None
    """agent whose next request will extend this row: the KV is kept for it; None keeps nothing"""
    on_token: OnToken | None = None
    """called for each sampled token, in the thread that steps the engine; False ends the row"""
    constraint: Constraint | None = None
    """the tokens that may be sampled; None: all"""
    top_logprobs: int = 0
    """number of likeliest tokens that `on_token` gets"""


@dataclass(frozen=True, slots=True)
class Sampled:
    ids: tuple[int, ...]
    """[M] sampled tokens, the end-of-turn token included when it was sampled"""
    logprobs: tuple[float, ...]
    """[M] log-probs under the distribution that was sampled from, float32"""
    finish: Finish
    seconds: float = field(default=0.0, compare=False)
    """this row's share of the engine's time; 0 without a scheduler"""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a row besides `max_tokens`."""

    eos_ids: Collection[int]
    context_limit: int
    decode: DecodeIds | None = None
    """needed by rows with stop strings"""

    def limit(self, request: GenerationRequest) -> int:
        """Number of tokens that the request may sample. Raises ContextFull if there is room for none."""
        room = self.context_limit - len(request.ids)
        if not 0 < room < self.context_limit:
            raise ContextFull(
                f"a row of {len(request.ids)} tokens leaves no room in a context of {self.context_limit}"
            )
        return min(request.sampling.max_tokens, room)


@dataclass(slots=True, eq=False)
class DecodingRow:
    request: GenerationRequest
    stop_conditions: StopConditions
    limit: int = field(init=False)
    uniforms: list[float] = field(init=False)
    """[limit] random numbers in [0, 1), one for each token that may be sampled"""
    ids: list[int] = field(default_factory=list)
    """[M] sampled so far"""
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    """None while it is being decoded"""

    def __post_init__(self) -> None:
        if self.request.sampling.stop and self.stop_conditions.decode is None:
            raise UsageError("stop strings need an engine that can turn tokens into text: give it `decode`")
        self.limit = self.stop_conditions.limit(self.request)
        self.uniforms = uniforms(self.request.seed, self.limit)

    @property
    def uniform(self) -> float:
        """The random number of the next token."""
        return self.uniforms[len(self.ids)]

    @property
    def position(self) -> int:
        """Position of the last token."""
        return len(self.request.ids) + len(self.ids) - 1

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of prompt and completion, or all if there are fewer."""
        return [*self.request.ids[-count:], *self.ids[-count:]][-count:]

    def take(self, token: int, logprob: float, likeliest: Likeliest = ()) -> None:
        """Append a sampled token, and set `finish` if it ends the row."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.request.constraint is not None:
            self.request.constraint.take(token)
        if token in self.stop_conditions.eos_ids or self._says_stop():
            self.finish = Finish.STOP
        elif len(self.ids) == self.limit:
            self.finish = Finish.LENGTH
        if self.request.on_token is not None and not self.request.on_token(token, logprob, likeliest):
            self.finish = self.finish or Finish.CANCELLED

    def sampled(self) -> Sampled:
        assert self.finish is not None
        return Sampled(tuple(self.ids), tuple(self.logprobs), self.finish)

    def _says_stop(self) -> bool:
        stop = self.request.sampling.stop
        if not stop or self.stop_conditions.decode is None:
            return False
        # a stop string may begin anywhere in a token, and no token but a control token is empty
        tail = max(len(text.encode()) for text in stop) + 1
        text = self.stop_conditions.decode(self.ids[-tail:])
        return any(end in text for end in stop)


def likeliest_tokens(rows: Sequence[DecodingRow], logits_BV: Tensor) -> list[Likeliest]:
    """[B] of each row, if it asks for them, at its temperature and before top-k, top-p and grammar."""
    return [
        likeliest(logits_V, row.request.sampling.temperature, row.request.top_logprobs)
        if row.request.top_logprobs
        else ()
        for row, logits_V in zip(rows, logits_BV, strict=True)
    ]


def allowed_tokens(rows: Sequence[DecodingRow], vocab_size: int) -> dict[int, Tensor]:
    """[V] bool of the tokens that each constrained row may sample next, by the row's place."""
    return {
        place: row.request.constraint.allowed(vocab_size)
        for place, row in enumerate(rows)
        if row.request.constraint is not None
    }
