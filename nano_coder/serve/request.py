"""What the wire dialects have in common: a request to the model, and its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nano_shared.errors import BudgetExhausted
from nano_shared.hashing import content_hash
from nano_shared.types import Completion, Role, Sampling, ToolSpec

if TYPE_CHECKING:
    from nano_coder.models.local.sampler import Likeliest


class TextDelta(NamedTuple):
    """New text of an answer, and the tokens sampled since the delta before."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Likeliest, ...] = ()
    """of each id, if asked for"""


OnText = Callable[[TextDelta], bool]
"""new text -> whether to go on"""


class RunEnded(BudgetExhausted):
    """A rollout has used up its turns or tokens, or its policy failed: its agent gets no answer any more."""


class BadRequest(Exception):
    """A request that cannot be served: HTTP status, sentence, and parameter and code of OpenAI's errors."""

    def __init__(
        self, text: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """A tool call, as it goes over the wire."""

    id: str
    name: str
    arguments: str
    """JSON"""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments; text that is no JSON object is kept as the argument `text`."""
        try:
            found = json.loads(self.arguments or "{}")
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"text": self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
    """A message of a conversation, whatever the wire dialect."""

    role: Role
    text: str
    calls: tuple[ClientCall, ...] = ()
    call_id: str | None = None
    """of the call that a tool's message answers"""

    @property
    def key(self) -> object:
        """Equal for an answer and for what a client sends back: ids, and space at the ends, may differ."""
        return [self.role.value, self.text.strip(), [[call.name, call.values] for call in self.calls]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form that a client asks for; without a schema and without calls, any."""

    schema: Mapping[str, Any] | None = None
    """of the text, a JSON document"""
    lenient: bool = False
    """whether keywords of the schema that cannot be enforced are ignored"""
    calls: tuple[str, ...] = ()
    """tools of which one must be called"""
    param: str = "response_format"
    """name of the schema in the request"""

    @property
    def any(self) -> bool:
        return self.schema is None and not self.calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    messages: tuple[ClientMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    sampling: Sampling
    more: Mapping[str, Any] = field(default_factory=dict)
    """for the server behind, if there is one: further parameters; None leaves one out"""
    form: AnswerForm = AnswerForm()
    top_logprobs: int = 0
    """likeliest tokens to tell of each place"""
    prompt_ids: tuple[int, ...] = ()
    """of a raw prompt, which no template renders and `messages` show as text"""
    choice: int = 0
    """its number among those of its client's request"""
    prefill: str = ""
    """beginning of the answer, which the client wrote; the end of `prompt_ids` once they are there"""

    def keys(self) -> list[str]:
        """[len(messages)] hashes of the tools and of the messages up to each one."""
        tools = [tool.model_dump(mode="json") for tool in self.tools]
        found, before = [], content_hash([tools, self.prompt_ids] if self.prompt_ids else tools)
        for message in self.messages:
            before = content_hash([before, message.key])
            found.append(before)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """The model's turn. `text` is what it wrote besides its calls, without a stop string."""

    run: str
    """id of the run in the log"""
    text: str
    calls: tuple[ClientCall, ...]
    completion: Completion
    prompt_ids: tuple[int, ...]
    """the whole row before the sampled tokens; empty where the policy gives no tokens"""
    prompt_tokens: int
    sampled_tokens: int
    previous_ended: float | None = None
    """unix seconds: end of the turn before, in the same conversation"""
    top: tuple[Likeliest, ...] = ()
    """of each sampled token, if asked for"""

    @property
    def filtered(self) -> bool:
        """Whether the filter of the provider behind stopped it."""
        return self.completion.api is not None and self.completion.api.filtered

    def tokens_after(self, count: int) -> TextDelta:
        """Its tokens but for the first `count`."""
        tokens = self.completion.tokens
        if tokens is None:
            return TextDelta()
        return TextDelta("", tokens.sampled_ids[count:], tokens.logprobs[count:], self.top[count:])

    @property
    def message(self) -> ClientMessage:
        return ClientMessage(role=Role.ASSISTANT, text=self.text, calls=self.calls)


def prefilled(messages: Sequence[ClientMessage], param: str) -> tuple[tuple[ClientMessage, ...], str]:
    """The messages before the last one, and the text of that, an assistant's turn that is left open. Raises
    BadRequest where there is none."""
    *before, last = messages
    if last.role is not Role.ASSISTANT or last.calls or not (before and last.text):
        raise BadRequest(f"{param}: only an assistant's text after other messages is continued", param=param)
    return tuple(before), last.text


def split_at_stop(completion: Completion) -> tuple[str, str | None]:
    """The text before its first stop string, and that string; the whole text and None without one."""
    text = completion.text
    found = [(at, stop) for stop in completion.sampling.stop if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), None))
    return text[:at], stop


def objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """The objects of a list; none for null. Raises BadRequest for anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise BadRequest(f"{where} must be a list of objects", param=where)
    return value


def role_of(message: Mapping[str, Any], roles: Mapping[str, Role], where: str) -> Role:
    """Raises BadRequest for a role that the API does not have."""
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise BadRequest(f"{where}.role must be one of {', '.join(roles)}", param=where)
    return roles[role]


def text_of(content: Any, *, where: str) -> str:
    """The text of a message's content: a string or a list of text parts. Raises BadRequest for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: content must be a text or a list of parts", param=where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        else:
            raise BadRequest(f"{where}: this model reads text, and no part of type {kind!r:.60}", param=where)
    return "".join(texts)


def tool_of(function: Any, *, where: str) -> ToolSpec:
    """A tool of the agent from its name, description and JSON schema. Raises BadRequest."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRequest(f"{where}: a function needs a name", param=where)
    schema = (
        function.get("parameters") or function.get("input_schema") or {"type": "object", "properties": {}}
    )
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{where}: the parameters must be a JSON schema", param=where)
    return ToolSpec(
        name=function["name"], description=str(function.get("description") or ""), parameters=dict(schema)
    )
