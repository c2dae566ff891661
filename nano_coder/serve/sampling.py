"""What of a request decides how its answer is sampled, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.request import BadRequest
from nano_shared.policy import Policy
from nano_shared.types import Sampling, Shaping

Body = Mapping[str, Any]
MOST_IDS = 1024
"""of `logit_bias` and of `allowed_token_ids`"""


MOST_STOPS, LONGEST_STOP = 64, 1024


class Bounds(NamedTuple):
    kind: type
    low: float
    high: float


SHAPING = {
    "frequency_penalty": Bounds(float, -2, 2), "presence_penalty": Bounds(float, -2, 2),
    "repetition_penalty": Bounds(float, 0.01, 100), "min_p": Bounds(float, 0, 1),
    "min_tokens": Bounds(int, 0, 1 << 31),
}  # fmt: skip
"""numbers that shape the logits"""
SHAPED = (*SHAPING, "logit_bias", "allowed_token_ids")


def number(body: Body, name: str, kind: type, low: float, high: float, usual: Any) -> Any:
    """A number of the body within its bounds; `usual` where it is absent or null. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise BadRequest(f"{name} must be a number", param=name)
    if not low <= value <= high:
        raise BadRequest(f"{name} = {value} is outside {low:g} to {high:g}", param=name)
    return kind(value)


def sampling_of(body: Body, longest: int, *, limits: Sequence[str]) -> Sampling:
    """The sampling of a request. `limits` are the names that its largest number of tokens may have."""
    stop = body.get("stop", body.get("stop_sequences"))
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest("stop must be a text, or a list of texts that are not empty", param="stop")
    if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
        why = f"{MOST_STOPS} texts of {LONGEST_STOP} characters are the most"
        raise BadRequest(f"stop: {why}", param="stop")  # each is looked for after each token
    most = next(
        (n for name in limits if (n := number(body, name, int, 1, 1 << 31, None)) is not None), longest
    )
    temperature = number(body, "temperature", float, 0, 100, 1.0)
    if 0 < temperature < 1e-6:  # log-probs of likeliest tokens would not be finite
        raise BadRequest("temperature must be 0 or at least 1e-6", param="temperature")
    return Sampling(
        temperature=temperature,
        top_p=number(body, "top_p", float, 1e-6, 1, 1.0),
        top_k=max(0, number(body, "top_k", int, -1, 1 << 31, 0)),
        max_tokens=min(most, longest),
        seed=number(body, "seed", int, -(1 << 63), 1 << 63, None),
        stop=tuple(stops),
        shaping=_shaping_of(body),
    )


def _shaping_of(body: Body) -> Shaping | None:
    """None where the request leaves the logits as they are."""
    values = {name: number(body, name, *bounds, None) for name, bounds in SHAPING.items()}
    allowed, bias = body.get("allowed_token_ids") or [], body.get("logit_bias") or {}
    if not isinstance(allowed, list) or not all(type(token) is int for token in allowed):
        raise BadRequest("allowed_token_ids must be a list of token ids", param="allowed_token_ids")
    if not isinstance(bias, Mapping) or not all(token.isascii() and token.isdigit() for token in bias):
        raise BadRequest("logit_bias must be an object of numbers by token id", param="logit_bias")
    for name, given in (("allowed_token_ids", allowed), ("logit_bias", bias)):
        if len(given) > MOST_IDS:
            raise BadRequest(f"{name} holds {len(given)} tokens; {MOST_IDS} are the most", param=name)
    try:
        biases = tuple((int(token), number(bias, token, float, -100, 100, 0.0)) for token in bias)
    except BadRequest as problem:
        raise BadRequest(f"logit_bias: {problem}", param="logit_bias") from None
    given = {name: value for name, value in values.items() if value is not None}
    shaping = Shaping(**given, allowed_token_ids=tuple(allowed), logit_bias=biases)
    return None if shaping == Shaping() else shaping


def check_shaping(sampling: Sampling, policy: Policy, *, formed: bool = False) -> None:
    """Raises BadRequest for logits that this policy cannot shape so; `formed`: under a grammar."""
    shaping = sampling.shaping
    if shaping is None:
        return
    names = [name for name in SHAPED if getattr(shaping, name) != getattr(Shaping(), name)]
    if not isinstance(policy, LocalPolicy):
        raise BadRequest(f"{names[0]}: only local weights can be sampled so", param=names[0])
    if shaping.allowed_token_ids and formed:
        raise BadRequest("allowed_token_ids cannot go with a form of answers", param="allowed_token_ids")
    for name, ids in (
        ("allowed_token_ids", shaping.allowed_token_ids), ("logit_bias", [t for t, _ in shaping.logit_bias])
    ):  # fmt: skip
        outside = next((token for token in ids if not 0 <= token < policy.vocab_size), None)
        if outside is not None:
            there = f"this model has {policy.vocab_size} tokens"
            raise BadRequest(f"{name} holds the id {outside}; {there}", param=name)
