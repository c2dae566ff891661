"""A chat completion: the request, with the parameters that a server takes, and its answer, put together from
the events of a stream or read from one object."""

from __future__ import annotations

import base64
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nano_coder.agent.dialects.api import Api
from nano_coder.agent.dialects.dialect import function_schema
from nano_coder.models.endpoint.exchange import (
    DONE,
    Cancelled,
    PassingFailure,
    RefusedRequest,
    error_inside,
    not_a_completion,
)
from nano_coder.models.endpoint.model_card import ModelCard
from nano_shared.errors import ContextFull
from nano_shared.policy import Conversation
from nano_shared.types import REDACTED_ID, ApiAnswer, ApiCall, Message, Role, Sampling, TurnTokens, Usage

_LENGTHS = ("max_completion_tokens", "max_tokens")
"""names of the limit of an answer: the API's own, and that of servers which still know the old one alone"""
UNSHAPED = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""parameters that leave the policy's distribution as it is. vLLM takes those that a request lacks from the
model's generation_config.json, and its log-probs do not show them"""
_OPTIONAL = ("temperature", "seed", "stop", "stream_options", "stream", "return_token_ids", "logprobs",
             *UNSHAPED)  # fmt: skip
_WITH_TOKENS = {"return_token_ids": True, "logprobs": True, "temperature": 1.0, **UNSHAPED}
"""asked for with tokens"""
_FULL = re.compile(
    r"context.{0,20}(length|window|size|limit)|context_length_exceeded|exceed_context|prompt is too long"
    r"|too many (input |prompt )?tokens",
    re.IGNORECASE,
)
_NUMBER = r"(\d[\d,]*)"
_CONTEXT = re.compile(
    rf"(?:context (?:length|window|size)\D{{0,30}}|n_ctx\D{{0,12}}){_NUMBER}", re.IGNORECASE
)
_PROMPT = re.compile(rf"{_NUMBER} (?:input tokens|in the messages|tokens in the prompt)", re.IGNORECASE)
_BLIND = re.compile(
    r"image.{0,20} (is|are) (not|only) supported|not a multi-?modal|at most 0 image|support (image|vision)"
    r"|unknown variant .?image|required for image|content must be a string",
    re.IGNORECASE,
)
"""how servers say that a model takes no images"""
IMAGES = "images"
"""stands for the images of messages among what a server refused"""
_MOST = re.compile(rf"at most {_NUMBER} (?:completion|output) tokens", re.IGNORECASE)


@dataclass(slots=True)
class Accepted:
    """Parameters that a server accepts for a model, as learnt from its refusals in this process."""

    length: str = _LENGTHS[0]
    """name of the limit of an answer"""
    most: int | None = None
    """longest answer that may be asked for"""
    context: int | None = None
    """context in tokens, where a refusal named it"""
    refused: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, refusal: RefusedRequest, body: dict[str, Any]) -> str | None:
        """Change the request so that it avoids a refusal. Returns a message for the user, empty if it was
        known before; None if no change avoids it.

        Raises ContextFull where the messages do not fit the model's context.
        """
        said, named = refusal.message, refusal.error.get("param")
        with self.lock:
            if _FULL.search(f"{refusal.error.get('code')} {said}"):
                return self._shorten(said, body)
            if IMAGES not in self.refused and shows_images(body) and _BLIND.search(said):
                self.refused.add(IMAGES)
                return "without images"
            if most := _MOST.search(said):
                number = int(most[1].replace(",", ""))
                if 0 < number < body.get(self.length, 0):
                    self.most = body[self.length] = number
                    return f"answers of {number} tokens, the most that it gives"
            for name in dict.fromkeys((named, *_mentioned(said, body))):
                if name not in body or name not in (*_LENGTHS, *_OPTIONAL):
                    continue
                known = name in self.refused  # by another call, meanwhile
                self.refused |= {name, "stream_options"} if name == "stream" else {name}
                value, instead = body.pop(name), ""
                if name in _LENGTHS:
                    self.length = next((n for n in _LENGTHS if n not in self.refused), "")
                    body |= {self.length: value} if self.length else {}
                    instead = f", with {self.length}" if self.length else ""
                if name == "stream":
                    body.pop("stream_options", None)
                return "" if known else f"without {name}{instead}"
        return None

    def _shorten(self, said: str, body: dict[str, Any]) -> str | None:
        """Reduce the answer's length to the room in the context. Raises ContextFull if there is none."""
        context, prompt = _CONTEXT.search(said), _PROMPT.search(said)
        if context:
            self.context = int(context[1].replace(",", "")) or None
        if context and prompt and self.length in body:
            room = int(context[1].replace(",", "")) - int(prompt[1].replace(",", ""))
            if 0 < room < body[self.length]:
                body[self.length] = room
                return ""
        raise ContextFull(f"the messages do not fit the context of the model: {said[:300]}")


@cache
def accepted_by(url: str, model: str) -> Accepted:
    return Accepted()


def _mentioned(said: str, body: dict[str, Any]) -> Iterator[str]:
    for name in (*_LENGTHS, *_OPTIONAL):
        if name in body and re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z_])", said):
            yield name


def request_body(
    model: str,
    conversation: Conversation,
    sampling: Sampling,
    accepted: Accepted,
    *,
    temperature: bool,
    card: ModelCard,
) -> dict[str, Any]:
    """The request, without parameters that are not set or that the server refused."""
    most = min(sampling.max_tokens, accepted.most or sampling.max_tokens)
    optional: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature if temperature else None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }
    if card.gives_tokens:
        optional |= _WITH_TOKENS | {n: v for n, v in optional.items() if v is not None}
    taken = {n: v for n, v in optional.items() if v is not None and n not in accepted.refused}
    tools = [function_schema(tool) for tool in conversation.tools]
    return {
        "model": model,
        "messages": _messages(conversation, card, blind=IMAGES in accepted.refused),
        **({"tools": tools} if tools else {}),
        **({accepted.length: most} if accepted.length else {}),
        **taken,
    }


def add_parameters(body: dict[str, Any], more: Mapping[str, Any], card: ModelCard) -> None:
    """Add parameters to a request; None leaves one out, but for those that tokens need."""
    for name, value in more.items():
        if value is not None:
            body[name] = value
        elif not (card.gives_tokens and name in _WITH_TOKENS):
            body.pop(name, None)


_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {},
    "response_format": {"type": "text"},
}  # fmt: skip


def shaping(body: Mapping[str, Any]) -> list[str]:
    """Parameters of a request under which a server does not sample from the policy's own distribution."""
    return [name for name, neutral in _NEUTRAL.items() if body.get(name) not in (None, neutral)]


def shows_images(body: Mapping[str, Any]) -> bool:
    return any(isinstance(message["content"], list) for message in body["messages"])


def _messages(conversation: Conversation, card: ModelCard, *, blind: bool) -> list[dict[str, Any]]:
    wired = _shown(conversation, card, blind=blind)
    return list(wired if card.profile else _joined(wired))


def _shown(conversation: Conversation, card: ModelCard, *, blind: bool) -> Iterator[dict[str, Any]]:
    """The messages as they are sent, with their images. Those of answers to calls, which the API takes as
    text alone, follow the last answer in a message of the user."""
    waiting: list[dict[str, Any]] = []
    for message in conversation.messages:
        wired = wire_message(message)
        if card.profile:  # the policy's own template renders them: roles as they are
            wired["role"] = message.role.value
        if waiting and message.call_id is None:
            yield {"role": "user", "content": waiting}
            waiting = []
        if message.images and blind:
            wired["content"] += f"\n[images left out, since this model sees none: {len(message.images)}]"
        elif message.images and message.call_id is not None:
            waiting += [_text_part(f"The images of the answer to {message.call_id}:")]
            waiting += _image_parts(message, conversation)
        elif message.images:
            wired["content"] = [_text_part(wired["content"]), *_image_parts(message, conversation)]
        yield wired
    if waiting:
        yield {"role": "user", "content": waiting}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_parts(message: Message, conversation: Conversation) -> Iterator[dict[str, Any]]:
    assert conversation.get_blob is not None  # whoever shows images gives it
    for image in message.images:
        data = base64.b64encode(conversation.get_blob(image.blob)).decode()
        yield {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}}


def wire_message(message: Message) -> dict[str, Any]:
    if message.role is Role.TOOL and message.call_id is not None:
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.content}
    if message.calls:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _wire_arguments(c)}}
            for c in message.calls
        ]
        return {"role": "assistant", "content": message.content or None, "tool_calls": calls}
    # many servers reject the role `tool` without the id of a call that they parsed themselves
    role = Role.USER if message.role is Role.TOOL else message.role
    return {"role": role.value, "content": message.content}


def _joined(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, neighbours of the user as one: some templates want roles to alternate."""
    last: dict[str, Any] | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "user":
            last = {**last, "content": _both(last["content"], message["content"])}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _both(first: Any, second: Any) -> Any:
    """Two contents as one: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [p for c in (first, second) for p in ([_text_part(c)] if isinstance(c, str) else c)]


def _wire_arguments(call: ApiCall) -> str:
    """Arguments as a JSON object, which some servers demand of history too."""
    parsed = Api().parse_api("", ApiAnswer(calls=(call,)), ())
    if parsed.error is not None:
        return json.dumps({"malformed": call.arguments})
    return json.dumps(parsed.calls[0].arguments) if parsed.repairs else call.arguments or "{}"


# ------------------------------------------------------------------------------------- the answer

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
            # servers that sample several answers stream each under its index; one was asked for
            for choice in [c for c in _list(event.get("choices")) if not c.get("index")][:1]:
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
    if isinstance(calls, dict):  # one call, or calls by their number
        calls = [calls] if {"function", "name"} & calls.keys() else calls.values()
    old = part.get("function_call")  # of the API before tools
    for delta in [*calls, *([{"function": old}] if old else ())]:
        _add_call(answer, delta, on_text)


def _add_call(answer: AnswerParts, raw: dict[str, Any], on_text: Callable[[str], None]) -> None:
    function = raw.get("function") or raw
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
