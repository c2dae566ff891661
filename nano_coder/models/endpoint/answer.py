"""The answer of an endpoint, put together from the events of a stream or read from one object."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_coder.models.endpoint.exchange import (
    DONE,
    Cancelled,
    PassingFailure,
    error_inside,
    not_a_completion,
)
from nano_shared.policy import Conversation
from nano_shared.types import REDACTED_ID, ApiCall, TurnTokens, Usage

CANCELLED = "cancelled"
"""`finish` of a cancelled answer"""
CUT = frozenset({"length", "max_tokens", "model_length"})
FILTERED = frozenset({"content_filter", "content-filter", "safety", "sensitive", "recitation", "refusal"})
_FAILED = frozenset({"error", "abort", "insufficient_system_resource"})
"""values of `finish_reason`, as servers and gateways spell them, in lower case"""
_ABOVE_ZERO = 1e-6
"""largest log-prob that rounding may produce"""
_NOTHING = ("{}", "null", '""')
"""arguments of a call without any"""


@dataclass(slots=True)
class _CallParts:
    index: Any = None
    id: str = ""
    name: str = ""
    arguments: str = ""

    @property
    def whole(self) -> bool:
        """Whether the arguments are complete JSON."""
        text = self.arguments.strip()
        if not text.endswith(("}", "null", '""')):
            return False
        try:
            json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return False
        return True

    def ends_before(self, delta: _CallParts) -> bool:
        """Whether a delta with the index of this call begins another one: some servers give each call the
        same index, others each delta an id."""
        more, other = delta.arguments.lstrip(), bool(delta.id and self.id and delta.id != self.id)
        if not self.arguments:
            return other or bool(delta.name and self.name and delta.name != self.name)
        if self.whole:
            repeated = not other and more in ("", self.arguments.lstrip())
            renamed = delta.name not in ("", self.name)
            return other or renamed or not (repeated or self.arguments in _NOTHING)
        if more.startswith("{") and (other or delta.name):
            return True
        return bool(delta.name) and (delta.name != self.name or (other and not more))

    def add(self, delta: _CallParts) -> None:
        self.id, self.name = self.id or delta.id, self.name or delta.name
        if not self.whole:
            self.arguments += delta.arguments
        elif self.arguments in _NOTHING:  # in place of arguments that follow
            self.arguments = delta.arguments or self.arguments


@dataclass(slots=True)
class AnswerParts:
    """The parts of an answer received so far."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None
    calls: list[_CallParts] = field(default_factory=list)
    fingerprint: str = ""
    """the server's name for the weights"""
    prompt_ids: list[Any] = field(default_factory=list)
    """as the server gave them, like `sampled_ids` and `logprobs`"""
    sampled_ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def api_calls(self, turn: int) -> tuple[ApiCall, ...]:
        """The calls in their order; one without an id of its own gets one from the turn."""
        calls: list[ApiCall] = []
        for number, call in enumerate(self.calls):
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
        if event is DONE:
            answer.finish = answer.finish or ("stop" if seen else None)
            return
        text, tokens = len(answer.text), len(answer.sampled_ids)
        try:
            if isinstance(event.get("usage"), dict):
                answer.usage = _usage(event["usage"])
            answer.fingerprint = str(event.get("system_fingerprint") or answer.fingerprint)
            answer.prompt_ids = _list(event.get("prompt_token_ids")) or answer.prompt_ids
            if "choices" not in event and not (seen or answer.usage):
                raise LookupError("choices")
            for choice in _list(event.get("choices"))[:1]:
                seen = True
                _take_choice(answer, choice, on_text)
        except (LookupError, TypeError, AttributeError, ValueError):
            raise not_a_completion(url, json.dumps(event, ensure_ascii=False)) from None
        new = answer.text[text:], answer.sampled_ids[tokens:], answer.logprobs[tokens:]
        if on_answer is not None and not on_answer(*new):
            raise Cancelled
    if not seen:
        raise PassingFailure("the answer holds no choices", "garbled")


def _take_choice(answer: AnswerParts, choice: dict[str, Any], on_text: Callable[[str], None]) -> None:
    """Add a choice, or a piece of it. Raises what an error in its place stands for."""
    whole = "message" in choice and not choice.get("delta")
    _add(answer, (choice["message"] if whole else choice.get("delta")) or {}, on_text)
    answer.sampled_ids += _list(choice.get("token_ids"))
    listed = _list((choice.get("logprobs") or {}).get("content"))
    answer.logprobs += [token.get("logprob") for token in listed]
    finish = choice.get("finish_reason")
    answer.finish = (str(finish).lower() if finish else answer.finish) or ("stop" if whole else None)
    if answer.finish in _FAILED:
        error = choice.get("error") or {"message": f"finish_reason {finish}", "code": 502}
        raise error_inside({"error": error})


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
    calls = part.get("tool_calls") or ()
    old = part.get("function_call")  # of the API before tools
    for delta in [*([calls] if isinstance(calls, dict) else calls), *([{"function": old}] if old else ())]:
        _add_call(answer, delta, on_text)


def _add_call(answer: AnswerParts, raw: dict[str, Any], on_text: Callable[[str], None]) -> None:
    function = raw.get("function") or {}
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    delta = _CallParts(raw.get("index"), _text(raw.get("id")), _text(function.get("name")), _text(arguments))
    call = _continued(answer.calls, delta)
    if call is None:
        call = _CallParts(delta.index)
        answer.calls.append(call)
    if delta.name and not call.name:
        on_text(f"\n{delta.name} ")
    call.add(delta)
    on_text(delta.arguments)


def _continued(calls: Sequence[_CallParts], delta: _CallParts) -> _CallParts | None:
    """The call that a delta continues: that of its id and index, else the last one of its index, or of all
    where it has none or counts the deltas. None where it begins one."""
    if not calls:
        return None
    same = [c for c in calls if c.index == delta.index] if delta.index is not None else calls[-1:]
    if found := [c for c in same if delta.id and c.id == delta.id]:
        same = found
    if same:
        return None if same[-1].ends_before(delta) else same[-1]
    last = calls[-1]
    other = delta.id not in ("", last.id)
    repeated = delta.name and (last.whole or not (delta.id or last.arguments))
    return None if other or repeated or last.ends_before(delta) else last


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
