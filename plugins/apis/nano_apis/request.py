"""What the wire dialects have in common: a request to the model, its sampling and form, and the answer."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nano_coder.agent.dialects.dialect import Compact, Dialect
from nano_coder.serve.access import BadRequest
from nano_shared.errors import BudgetExhausted, Refused
from nano_shared.files import content_hash
from nano_shared.policy import DecodeIds, Likeliest, Policy
from nano_shared.strict_json import json_object
from nano_shared.types import Completion, Role, Sampling, Shaping, ToolCall, ToolSpec

Body = Mapping[str, Any]
LONGEST_SCHEMA = 1 << 18
"""characters of a schema as JSON"""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    id: str
    name: str
    arguments: str
    """JSON"""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments; text that is no JSON object is kept as the argument `text`."""
        try:
            return json_object(self.arguments or "{}")
        except Refused:
            return {"text": self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
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

    def seeded(self, index: int) -> ModelRequest:
        seed = self.sampling.seed if self.sampling.seed is None else self.sampling.seed + index
        return replace(self, choice=index, sampling=self.sampling.model_copy(update={"seed": seed}))

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
    top: tuple[Likeliest, ...] = ()
    """of each sampled token, if asked for"""

    @property
    def filtered(self) -> bool:
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


Event = tuple[str, Mapping[str, Any] | None]
"""name of a server-sent event, empty for none, and its data; None is [DONE]"""


class AnswerWriter(ABC):
    """Writes the answers to one request in the form of an API, whole or as server-sent events. `at` is the
    number of the choice."""

    prefix = ""
    """of the ids of answers"""

    def __init__(self, body: Body, model: str, decode: DecodeIds | None) -> None:
        self._body, self._decode = body, decode
        self._model = str(body.get("model") or model)
        self._id = f"{self.prefix}{secrets.token_hex(12)}"
        self._told: Counter[int] = Counter()
        """tokens of each choice that were sent"""
        self.streams = bool(body.get("stream"))
        options = body.get("stream_options")
        self._tells_usage = bool(isinstance(options, Mapping) and options.get("include_usage"))

    @abstractmethod
    def whole(self, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def first(self, at: int) -> Iterable[Event]: ...

    @abstractmethod
    def text(self, at: int, delta: TextDelta) -> Iterable[Event]: ...

    @abstractmethod
    def end(self, at: int, answer: ModelAnswer) -> Iterable[Event]: ...

    def close(self) -> Iterable[Event]:
        """After the end of all choices."""
        return ()

    def error(self, shape: dict[str, Any]) -> dict[str, Any]:
        """The data of the event `error`, from the error in the shape of the API."""
        return shape


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
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise BadRequest(f"{where}.role must be one of {', '.join(roles)}", param=where)
    return roles[role]


def text_of(content: Any, *, where: str) -> str:
    """The text of a message's content: a string or a list of text parts. Raises BadRequest for others."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where}: content must be a text or a list of parts", param=where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text"):
            if not isinstance(part.get("text"), str):
                raise BadRequest(f"{where}: a part of type {kind!r} needs a text", param=where)
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
    empty = {"type": "object", "properties": {}}
    schema = function.get("parameters") or function.get("input_schema") or empty
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{where}: the parameters must be a JSON schema", param=where)
    return ToolSpec(
        name=function["name"], description=str(function.get("description") or ""), parameters=dict(schema)
    )


# -------------------------------------------------------------------------------------- form


def form_of(
    form: Any, choice: Any, tools: Sequence[ToolSpec], *, param: str = "response_format"
) -> AnswerForm:
    """The form that a request asks for, whichever API it came by. Raises BadRequest."""
    schema, lenient = _schema_of(form, param)
    return AnswerForm(schema=schema, lenient=lenient, calls=_calls_of(choice, tools), param=param)


def _schema_of(form: Any, param: str) -> tuple[Mapping[str, Any] | None, bool]:
    if form is None:
        return None, False
    kind = form.get("type", "text") if isinstance(form, Mapping) else None
    if kind == "text":
        return None, False
    if kind == "json_object":
        return {"type": "object"}, False
    if kind != "json_schema":
        raise BadRequest(f"{param}.type must be text, json_object or json_schema", param=param)
    told = form.get("json_schema", form)
    schema = told.get("schema") if isinstance(told, Mapping) else None
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{param} of type json_schema needs a schema, which is an object", param=param)
    if len(json.dumps(schema)) > LONGEST_SCHEMA:
        raise BadRequest(f"{param}: the schema is longer than {LONGEST_SCHEMA >> 10} KiB", param=param)
    return schema, told.get("strict") is False


def _calls_of(choice: Any, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """Names of the tools of which one must be called; none where that is left to the model."""
    offered = tuple(tool.name for tool in tools)
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else choice
    if kind in (None, "auto", "none"):
        return ()
    if kind in ("required", "any"):
        if not offered:
            why = "asks for a call, and the request offers no tools"
            raise BadRequest(f"tool_choice {why}", param="tool_choice")
        return offered
    if kind not in ("function", "tool"):
        why = "is not served: send auto, none, required or a function's name"
        raise BadRequest(f"tool_choice {kind!r:.60} {why}", param="tool_choice")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in offered:
        why = "which the request does not offer"
        raise BadRequest(f"tool_choice names {name!r:.100}, {why}", param="tool_choice")
    return (str(name),)


# ------------------------------------------------------------------- the grammar of a form

_PROBE = {"nano_probe": 1}
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TIGHT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADVICE = "leave tool_choice at auto"


def grammar_of(
    form: AnswerForm, tools: Sequence[ToolSpec], dialect: Dialect, added_tokens: Mapping[str, int]
) -> str:
    """The grammar of answers of this form, for llguidance; where the tools need not be called, of calls too.

    `added_tokens` are those that text is not encoded to: they are matched by their ids. Raises BadRequest for
    a dialect whose calls cannot be written as a grammar, and ConfigError without llguidance.
    """
    from llguidance import LLMatcher

    called = [tool for tool in tools if not form.calls or tool.name in form.calls]
    if form.schema is not None and not (tools or form.calls):
        told = {**_SPACED, "lenient": form.lenient}
        return str(LLMatcher.grammar_from_json_schema(dict(form.schema), overrides=told))
    rules: list[str] = []
    if form.schema is not None and not form.calls:
        rules.append(_json(form.schema, {**_SPACED, "lenient": form.lenient}))
    rules += [_call_rule(tool, dialect, added_tokens) for tool in called]
    starts = " | ".join(f"rule{number}" for number in range(len(rules)))
    lines = [f"start: {starts}", *(f"rule{number}: {rule}" for number, rule in enumerate(rules))]
    return str(LLMatcher.grammar_from_lark("\n".join(lines) + "\n"))


def _call_rule(tool: ToolSpec, dialect: Dialect, added_tokens: Mapping[str, int]) -> str:
    """The rule of one call: what the dialect writes around the arguments, and their schema.

    Dialects that write the arguments as one JSON object are told by what they render.
    """
    if isinstance(dialect, Compact):
        return _compact_rule(tool)
    try:
        text = dialect.render("", [ToolCall(name=tool.name, arguments=_PROBE)], [tool])
    except ValueError as problem:
        raise BadRequest(f"tool_choice: {problem}; {_ADVICE}", param="tool_choice") from None
    for options in (_SPACED, _TIGHT):
        written = json.dumps(
            _PROBE, separators=(str(options["item_separator"]), str(options["key_separator"]))
        )
        if text.count(written) == 1:
            before, _, after = text.partition(written)
            parts = (
                _literal(before, added_tokens),
                _json(tool.parameters, options),
                _literal(after, added_tokens),
            )
            return " ".join(part for part in parts if part)
    raise BadRequest(
        f"tool_choice: calls of this model's dialect, {dialect.name}, cannot be forced; {_ADVICE}",
        param="tool_choice",
    )


def _compact_rule(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties") or {}
    keys = properties if isinstance(properties, Mapping) else {}
    if not all(_KEY.fullmatch(name) for name in (tool.name, *keys)):
        raise BadRequest(
            f"tool_choice: {tool.name!r:.60} has a name that the compact dialect cannot write; {_ADVICE}",
            param="tool_choice",
        )
    definitions: dict[str, Any] = {
        name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters
    }
    required = tool.parameters.get("required") or ()
    parts = [json.dumps(f"@{tool.name}")]
    for name, schema in keys.items():
        value = _json({**definitions, **schema} if isinstance(schema, Mapping) else {}, _TIGHT)
        part = f"{json.dumps(f' {name}=')} {value}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": dict(options)})


def _literal(text: str, added_tokens: Mapping[str, int]) -> str:
    """A text as literals of the grammar, with its added tokens by id."""
    longest = sorted((token for token in added_tokens if token), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest))})", text) if longest else [text]
    return " ".join(
        f"<[{added_tokens[part]}]>" if part in added_tokens else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


# ------------------------------------------------------------------------------- sampling

MOST_IDS = 1024
"""of `logit_bias` and of `allowed_token_ids`"""
MOST_STOPS, LONGEST_STOP = 64, 1024
SHAPING: dict[str, tuple[type, float, float]] = {
    "frequency_penalty": (float, -2, 2), "presence_penalty": (float, -2, 2),
    "repetition_penalty": (float, 0.01, 100), "min_p": (float, 0, 1), "min_tokens": (int, 0, 1 << 31),
}  # fmt: skip
"""numbers that shape the logits, with their bounds"""
SHAPED = (*SHAPING, "logit_bias", "allowed_token_ids")


def number(body: Body, name: str, kind: type, low: float, high: float, usual: Any) -> Any:
    """A number of the body within its bounds; `usual` where it is absent or null. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise BadRequest(f"{name} must be a {'whole ' * (kind is int)}number", param=name)
    if not low <= value <= high:
        raise BadRequest(f"{name} = {value} is outside {low:g} to {high:g}", param=name)
    return kind(value)


_FLAGS = ("stream", "echo", "return_token_ids", "return_tokens_as_token_ids", "parallel_tool_calls")


def flag(body: Body, name: str) -> bool:
    """False where it is absent or null. Raises BadRequest for what is neither true nor false."""
    if not isinstance(value := body.get(name) or False, bool):
        raise BadRequest(f"{name} must be true or false", param=name)
    return value


def sampling_of(body: Body, longest: int, *, limits: Sequence[str]) -> Sampling:
    """The sampling of a request, whose flags are looked at too. `limits` are the names that its largest
    number of tokens may have."""
    for name in _FLAGS:
        flag(body, name)
    for options in objects([body.get("stream_options") or {}], "stream_options"):
        flag(options, "include_usage")
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
    from nano_coder.models.local.policy import LocalPolicy

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


# ------------------------------------------------------------------------------- known fields

_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority",
    "prompt_cache_retention", "prompt_cache_options", "client_metadata", "request_id", "cache_salt",
    "cache_prompt", "keep_alive", "prediction", "inference_geo", "speed", "cache_control", "betas",
    "anthropic_version", "context_management", "reasoning", "reasoning_effort", "include_reasoning",
    "thinking", "verbosity", "parallel_tool_calls", "max_tool_calls", "truncation", "stream_options",
    "top_logprobs",
})  # fmt: skip
"""fields that are ignored: who asks, what is stored and cached, hints, and what has no effect in this API"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "background": (False,),
    "logprobs": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "modalities": (["text"],),
    "ignore_eos": (False,), "include_stop_str_in_output": (False,), "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True,), "add_special_tokens": (True, False), "length_penalty": (1.0,),
    "use_beam_search": (False,), "early_stopping": (False,), "typical_p": (1.0,), "top_a": (0.0,),
    "mirostat": (0,),
}  # fmt: skip
"""values that change nothing, of fields that are not served; null and what is empty never does"""
_INSTEAD = {
    "previous_response_id": "no response is stored here; send the whole input",
    "continue_final_message": "an answer begins anew", "add_generation_prompt": "an answer begins anew",
    "suffix": "this model does not fill in the middle",
    "best_of": "this server samples no more than it answers; send n",
    "chat_template_kwargs": "the template of the policy takes none",
    "chat_template": "the policy has a template of its own",
    "functions": "send tools",
    "guided_json": "send response_format", "structured_outputs": "send response_format",
}  # fmt: skip
"""field -> why it is not served, or what is"""


def check_fields(known: Collection[str], body: Body, ends: frozenset[int] = frozenset()) -> None:
    """Raises BadRequest for a field that is not `known` and that may change the answer.

    `ends` are the tokens at which every turn ends, so that to name them as `stop_token_ids` changes nothing.
    """
    for name, value in body.items():
        if name in known or name in _IGNORED or value is None or value in ("", [], {}):
            continue
        if name == "stop_token_ids" and isinstance(value, list) and all(token in ends for token in value):
            continue
        if value not in _NEUTRAL.get(name, ()):
            why = f"{name!r:.100} is not served here, and may change the answer"
            raise BadRequest(f"{why}: {_INSTEAD.get(name, 'leave it out')}", param=name[:100])
