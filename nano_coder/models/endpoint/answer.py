"""The answer of an endpoint, put together from the events of a stream or read from one object."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_coder.models.endpoint.exchange import Cancelled, PassingFailure, not_a_completion
from nano_shared.policy import Conversation
from nano_shared.types import REDACTED_ID, ApiCall, TurnTokens, Usage

CANCELLED = "cancelled"
"""`finish` of a cancelled answer"""
_ABOVE_ZERO = 1e-6
"""largest log-prob that rounding may produce"""


@dataclass(slots=True)
class _CallParts:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerParts:
    """The parts of an answer received so far."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None
    calls: dict[object, _CallParts] = field(default_factory=dict)
    """by the index or id that the server gave"""
    fingerprint: str = ""
    """the server's name for the weights"""
    prompt_ids: list[Any] = field(default_factory=list)
    """as the server gave them, like `sampled_ids` and `logprobs`"""
    sampled_ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def api_calls(self, turn: int) -> tuple[ApiCall, ...]:
        """The calls in their order; one without an id of its own gets one from the turn."""
        calls: list[ApiCall] = []
        for number, call in enumerate(self.calls.values()):
            taken = {other.id for other in calls}
            own = call.id if call.id and call.id not in taken else f"call_{turn}_{number}"
            calls.append(ApiCall(id=own, name=call.name, arguments=call.arguments))
        return tuple(calls)


OnAnswer = Callable[[str, Sequence[int], Sequence[float]], bool]
"""new text of an answer with its ids and log-probs, or nothing while none comes -> whether to go on"""


def read_answer(
    events: Iterable[dict[str, Any]],
    url: str,
    on_text: Callable[[str], None],
    on_answer: OnAnswer | None = None,
) -> AnswerParts:
    """Put an answer together; what `on_answer` ends is cancelled. Raises PassingFailure for an incomplete
    answer, PolicyError for an invalid one."""
    answer = AnswerParts()
    try:
        _read(answer, events, url, on_text, on_answer)
    except Cancelled:
        answer.finish = CANCELLED
    if answer.finish is None:
        raise PassingFailure("the answer was cut off before its end", "busy")
    return answer


def _read(
    answer: AnswerParts,
    events: Iterable[dict[str, Any]],
    url: str,
    on_text: Callable[[str], None],
    on_answer: OnAnswer | None,
) -> None:
    seen = False
    for event in events:
        text, tokens = len(answer.text), len(answer.sampled_ids)
        try:
            if isinstance(event.get("usage"), dict):
                answer.usage = _usage(event["usage"])
            answer.fingerprint = str(event.get("system_fingerprint") or answer.fingerprint)
            answer.prompt_ids = _list(event.get("prompt_token_ids")) or answer.prompt_ids
            for choice in event["choices"][:1]:
                seen = True
                whole = "message" in choice
                _add(answer, choice["message"] if whole else choice.get("delta") or {}, on_text)
                answer.sampled_ids += _list(choice.get("token_ids"))
                listed = _list((choice.get("logprobs") or {}).get("content"))
                answer.logprobs += [token.get("logprob") for token in listed]
                answer.finish = choice.get("finish_reason") or answer.finish or ("stop" if whole else None)
            if not (event["choices"] or seen or answer.usage):
                raise LookupError("choices")
        except (LookupError, TypeError, AttributeError, ValueError):
            raise not_a_completion(url, json.dumps(event, ensure_ascii=False)) from None
        new = answer.text[text:], answer.sampled_ids[tokens:], answer.logprobs[tokens:]
        if on_answer is not None and not on_answer(*new):
            raise Cancelled


def turn_tokens(answer: AnswerParts, conversation: Conversation) -> TurnTokens | str:
    """The tokens of an answer as the next turn of a conversation, or why they cannot be logged.

    A prompt that does not begin with what the conversation holds begins a new row.
    """
    prompt, sampled, logprobs = answer.prompt_ids, answer.sampled_ids, answer.logprobs
    if not (prompt and sampled):
        return "the server gave no token ids"
    if len(sampled) != len(logprobs):
        return f"the server gave {len(sampled)} sampled ids and {len(logprobs)} log-probs"
    counted = answer.usage.completion if answer.usage else 0
    if counted not in (0, len(sampled)):
        return f"the server gave {len(sampled)} sampled ids and counted {counted}"
    if not all(type(i) is int and 0 <= i < REDACTED_ID for i in (*prompt, *sampled)):
        return "the server gave ids that are no token ids"
    if not all(type(p) in (int, float) and math.isfinite(p) and p <= _ABOVE_ZERO for p in logprobs):
        return "the server gave log-probs that are not finite numbers up to 0"
    before = conversation.tokens
    goes_on = len(prompt) > len(before) and prompt[: len(before)] == before
    return TurnTokens(
        row=conversation.row if goes_on else conversation.last_row + 1,
        context_ids=tuple(prompt[len(before) :] if goes_on else prompt),
        sampled_ids=tuple(sampled),
        logprobs=tuple(logprobs),
    )


def _list(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise TypeError("no list")
    return value or []


def _add(answer: AnswerParts, part: dict[str, Any], on_text: Callable[[str], None]) -> None:
    reasoning = _text(part.get("reasoning_content") or part.get("reasoning"))
    text = _text(part.get("content")) or _text(part.get("refusal"))
    answer.reasoning += reasoning
    answer.text += text
    on_text(reasoning + text)
    for delta in part.get("tool_calls") or ():
        _add_call(answer, delta, on_text)


def _add_call(answer: AnswerParts, delta: dict[str, Any], on_text: Callable[[str], None]) -> None:
    key = delta.get("index")
    if key is None:  # some servers number no calls: an id begins one
        key = delta.get("id") or next(reversed(answer.calls), 0)
    call = answer.calls.setdefault(key, _CallParts())
    function = delta.get("function") or {}
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call.id = call.id or _text(delta.get("id"))
    if not call.name:
        call.name = _text(function.get("name"))
        on_text(f"\n{call.name} " if call.name else "")
    call.arguments += _text(arguments)
    on_text(_text(arguments))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):  # content in parts
        return "".join(_text(part.get("text")) for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        raise TypeError("no text")
    # JSON can spell half a surrogate pair, which cannot be sent back
    return value.encode("utf-8", "backslashreplace").decode()


def _usage(said: dict[str, Any]) -> Usage:
    return Usage(
        prompt=_number(said.get("prompt_tokens")),
        cached=_number((said.get("prompt_tokens_details") or {}).get("cached_tokens")),
        completion=_number(said.get("completion_tokens")),
        reasoning=_number((said.get("completion_tokens_details") or {}).get("reasoning_tokens")),
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
