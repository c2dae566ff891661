"""Rows that are decoded, and the draw of their tokens: temperature, top-k, top-p, and a seed of each row;
which tokens a grammar allows, by llguidance."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nano_shared.errors import ConfigError, ContextFull, PolicyError, UsageError
from nano_shared.policy import DecodeIds, Likeliest
from nano_shared.types import Finish, Sampling, Shaping

if TYPE_CHECKING:
    from nano_coder.models.repetition import Repetition


_BLOCK = 128
"""tokens of one block of the vocabulary: the CDF is searched over blocks, then inside one"""

_COLDEST = 1e-30
"""temperature below which logits divided by it need not be finite in float32"""

_FORBIDDEN = 1e4
"""taken from a logit whose token is not sampled while there is another one"""

_SUBNORMAL = 1.2e-38
"""below this a float32 has lost digits"""


def uniforms(seed: int | None, count: int) -> list[float]:
    """[count] float64 in [0, 1) from one row's seed; they depend neither on the batch nor on the device.

    `seed` None: a seed from the operating system.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    drawn: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return drawn


def draw(
    logits_BV: Tensor,
    samplings: Sequence[Sampling],
    uniforms_B: Sequence[float],
    shaped: Mapping[int, Tensor] | None = None,
) -> tuple[list[int], list[float]]:
    """[B] tokens by inverse CDF, and [B] log-probs of the processed distribution, renormalised.

    `shaped` are [V] logits in place of a row's own, by row (`shaped_logits`). Temperature first, then top-k,
    then top-p. A greedy row takes the likeliest token, with log-probs of temperature 1. The log-probs of a
    row in `shaped` are those of its own logits, so that a forward pass recomputes them from the weights
    alone. Does not modify the logits.
    """
    device = logits_BV.device
    logits_BV = logits_BV.float()
    places = torch.tensor(sorted(shaped or ()), device=device, dtype=torch.long)
    own_RV = logits_BV[places]
    if shaped:
        logits_BV = logits_BV.index_copy(0, places, torch.stack([shaped[row] for row in sorted(shaped)]))
    logits_BV = _tempered(logits_BV, samplings)
    cut = [row for row, s in enumerate(samplings) if s.top_p < 1 or s.top_k > 0]
    if cut:
        rows = torch.tensor(cut, device=device)
        kept = _truncated(logits_BV[rows], [samplings[row] for row in cut])
        logits_BV = logits_BV.index_copy(0, rows, kept)
    probs_BV = logits_BV.softmax(dim=-1)
    targets_B = torch.tensor(uniforms_B, dtype=torch.float64, device=device)
    tokens_B1 = _invert(probs_BV, targets_B[:, None])
    greedy = [s.temperature == 0 for s in samplings]
    if any(greedy):
        likeliest_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        tokens_B1 = torch.where(torch.tensor(greedy, device=device)[:, None], likeliest_B1, tokens_B1)
    # the logarithm of a float32 probability is as exact as a float32 log-softmax: to some 1e-7 of a nat
    drawn_B1 = probs_BV.gather(1, tokens_B1)
    logprobs_B1 = drawn_B1.log()
    if bool((drawn_B1 < _SUBNORMAL).any()):
        logprobs_B1 = logits_BV.log_softmax(dim=-1).gather(1, tokens_B1)
    if shaped:
        own_RV = _tempered(own_RV, [samplings[row] for row in sorted(shaped)])
        own_R1 = own_RV.log_softmax(dim=-1).gather(1, tokens_B1[places])
        logprobs_B1 = logprobs_B1.index_copy(0, places, own_R1)
    return tokens_B1[:, 0].tolist(), logprobs_B1[:, 0].tolist()


def _tempered(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits divided by their row's temperature; by 1 where it is greedy."""
    if all(s.temperature in (0, 1) for s in samplings):
        return logits_BV
    temperature_B = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits_BV.device)
    if any(0 < s.temperature < _COLDEST for s in samplings):  # the quotient would be infinite
        logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    return logits_BV / temperature_B.clamp(min=_COLDEST)[:, None]


def _invert(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """[B, 1] tokens where the CDF passes the uniforms.

    Two searches: over sums of blocks, then inside the block found. Only these few are summed up in float64,
    in which, unlike float32, many partial sums do not swallow the tail. A token of weight 0 is never drawn:
    the CDF does not rise there, and the targets lie below its end.
    """
    size = weights_BV.shape[1]
    if size % _BLOCK:
        weights_BV = F.pad(weights_BV, (0, -size % _BLOCK))
    blocks_BNK = weights_BV.view(weights_BV.shape[0], -1, _BLOCK)
    cdf_BN = blocks_BNK.sum(dim=-1).double().cumsum(dim=-1)
    totals_B1 = cdf_BN[:, -1:]
    targets_B1 = _below(uniforms_B1 * totals_B1, totals_B1)
    block_B1 = torch.searchsorted(cdf_BN, targets_B1, right=True)
    before_B1 = torch.where(block_B1 > 0, cdf_BN.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    inner_BK = blocks_BNK.gather(1, block_B1[..., None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    # the block's float32 sum and this float64 one differ by rounding, so the target may lie past its end
    inside_B1 = _below(targets_B1 - before_B1, inner_BK[:, -1:])
    return block_B1 * _BLOCK + torch.searchsorted(inner_BK, inside_B1, right=True)


def _below(values: Tensor, ends: Tensor) -> Tensor:
    return torch.minimum(values, torch.nextafter(ends, torch.zeros_like(ends)))


def _truncated(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[B, V] log-probs with the tokens outside top-k and top-p at minus infinity."""
    device = logits_BV.device
    top_k_B1 = torch.tensor([s.top_k for s in samplings], device=device)[:, None]
    top_p_B1 = torch.tensor([s.top_p for s in samplings], device=device, dtype=torch.float64)[:, None]
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(ordered_BV.shape[1], device=device)
    drop_BV = (top_k_B1 > 0) & (rank_V >= top_k_B1)
    probs_BV = ordered_BV.masked_fill(drop_BV, -torch.inf).softmax(dim=-1, dtype=torch.float64)
    # nucleus: a token stays if the tokens before it do not reach top_p yet (Holtzman et al. 2020)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    drop_BV |= (top_p_B1 < 1) & (before_BV >= top_p_B1)
    drop_BV[:, 0] = False
    kept_BV = ordered_BV.masked_fill(drop_BV, -torch.inf)
    return torch.empty_like(kept_BV).scatter_(1, order_BV, kept_BV).log_softmax(dim=-1)


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
    repetition: Repetition | None = None
    """ends the row when it finds one; None: nothing does"""
    stop: threading.Event | None = None
    """set, nobody waits for the row any more"""

    @property
    def is_shaped(self) -> bool:
        """Whether its tokens are drawn from other logits than the policy's own."""
        return self.constraint is not None or self.sampling.shaping is not None


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
    limited_by: str = "its context"
    """what sets `context_limit`"""

    def limit(self, request: GenerationRequest) -> int:
        """Number of tokens that the request may sample. Raises ContextFull if there is room for none."""
        room = self.context_limit - len(request.ids)
        if not 0 < room < self.context_limit:
            raise ContextFull(
                f"a row of {len(request.ids)} tokens leaves no room in a context of {self.context_limit}"
                f" ({self.limited_by})"
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
    def position(self) -> int:
        """Position of the last token."""
        return len(self.request.ids) + len(self.ids) - 1

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of prompt and completion, or all if there are fewer."""
        return [*self.request.ids[-count:], *self.ids[-count:]][-count:]

    def take(self, token: int, logprob: float, likeliest: Likeliest = ()) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.request.constraint is not None:
            self.request.constraint.take(token)
        if token in self.stop_conditions.eos_ids or self._says_stop():
            self.finish = Finish.STOP
        elif self.request.repetition is not None and self.request.repetition.take(token):
            self.finish = Finish.REPETITION
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


class Unwanted(Exception):
    """Every row of a decoder was stopped during a prefill, which leaves it in pieces: it is to be freed."""


def refuse_unwanted(rows: Sequence[DecodingRow]) -> None:
    """Raises Unwanted if nobody waits for any of these rows."""
    if all(row.request.stop is not None and row.request.stop.is_set() for row in rows):
        raise Unwanted


def draw_rows(
    places: Sequence[tuple[DecodingRow, int]], logits_BV: Tensor
) -> Iterator[tuple[int, float, Likeliest]]:
    """[B] token, log-prob and, if the row asks for them, the likeliest tokens of each place: a row, and the
    number of draft tokens before it."""
    rows = [row for row, _ in places]
    tokens, logprobs = draw(
        logits_BV,
        [row.request.sampling for row in rows],
        [row.uniforms[len(row.ids) + nth] for row, nth in places],
        shaped_logits(rows, logits_BV),
    )
    return zip(tokens, logprobs, map(_likeliest, rows, logits_BV), strict=True)


def _likeliest(row: DecodingRow, logits_V: Tensor) -> Likeliest:
    """At the row's temperature, and before top-k, top-p and grammar."""
    if not row.request.top_logprobs:
        return ()
    logprobs_V = (logits_V.float() / (row.request.sampling.temperature or 1.0)).log_softmax(dim=-1)
    best = logprobs_V.topk(min(row.request.top_logprobs, len(logprobs_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def shaped_logits(rows: Sequence[DecodingRow], logits_BV: Tensor) -> dict[int, Tensor]:
    """[V] float32 logits of the next token of each row that a client's Shaping or a grammar changes, by the
    row's place."""
    found = {}
    for place, row in enumerate(rows):
        if not row.request.is_shaped:
            continue
        logits_V = logits_BV[place].float()
        if (shaping := row.request.sampling.shaping) is not None:
            logits_V = _shaped(logits_V, shaping, row)
        if (constraint := row.request.constraint) is not None:
            allowed_V = constraint.allowed(len(logits_V)).to(logits_V.device)
            logits_V = logits_V.masked_fill(~allowed_V, -torch.inf)
        found[place] = logits_V
    return found


def _shaped(logits_V: Tensor, shaping: Shaping, row: DecodingRow) -> Tensor:
    device, shaped_V = logits_V.device, logits_V.clone()
    if shaping.allowed_token_ids:
        allowed = torch.tensor(shaping.allowed_token_ids, device=device)
        shaped_V = torch.full_like(logits_V, -torch.inf).index_copy(0, allowed, logits_V[allowed])
    for token, bias in shaping.logit_bias:
        shaped_V[token] += bias
    if len(row.ids) < shaping.min_tokens:
        shaped_V[sorted(row.stop_conditions.eos_ids)] -= _FORBIDDEN
    seen = torch.tensor(sorted({*row.request.ids, *row.ids}), device=device)
    seen_N = shaped_V[seen]
    penalty = shaping.repetition_penalty
    shaped_V[seen] = torch.where(seen_N > 0, seen_N / penalty, seen_N * penalty)
    times_V = torch.bincount(torch.tensor(row.ids, device=device, dtype=torch.long), minlength=len(logits_V))
    shaped_V -= shaping.frequency_penalty * times_V + shaping.presence_penalty * (times_V > 0)
    if shaping.min_p and row.request.sampling.temperature:  # of probabilities at the temperature
        least = shaped_V.max() + row.request.sampling.temperature * math.log(shaping.min_p)
        shaped_V[shaped_V < least] = -torch.inf
    return shaped_V


# ------------------------------------------------------------------------- constrained decoding

MISSING = "llguidance is missing, which constrains what is sampled; pip install 'nano-rl-coder[constrained]'"


class Grammars:
    """Compiles grammars over one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: str, eos_ids: Sequence[int], vocab_size: int) -> None:
        """`tokenizer` is the content of a tokenizer.json; `eos_ids` end a text that the grammar accepts."""
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, sorted(eos_ids), vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def constraint(self, grammar: str) -> Constraint:
        """The state of a new text. Raises UsageError for a grammar that cannot be compiled, and ConfigError
        without llguidance."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise ConfigError(MISSING) from None
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids
                )
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"the grammar cannot be compiled: {matcher.get_error()}")
        return Constraint(matcher, self._eos_ids, self._vocab_size)


class Constraint:
    def __init__(self, matcher: Any, eos_ids: Sequence[int], vocab_size: int) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self._matcher, self._eos_ids = matcher, eos_ids
        self._bits = allocate_token_bitmask(1, vocab_size)

    def allowed(self, vocab_size: int) -> Tensor:
        """[V] bool: tokens that may come next; only those that end the text once the matcher has failed."""
        import numpy as np
        from llguidance.numpy import fill_next_token_bitmask

        allowed = np.zeros(vocab_size, dtype=bool)
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            allowed[self._eos_ids] = True
        else:
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:vocab_size]
            allowed[: len(bits)] = bits
        return torch.from_numpy(allowed)

    def take(self, token: int) -> None:
        if token not in self._eos_ids:
            self._matcher.consume_token(token)

    def check(self) -> None:
        """Raises PolicyError if the grammar has become too complex for the text, which then breaks it."""
        if self._matcher.is_error():
            why, _, _ = self._matcher.get_error().partition("\n<state>")
            raise PolicyError(f"the grammar could not be followed; simplify it: {why:.300}")
