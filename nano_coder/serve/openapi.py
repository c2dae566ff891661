"""The OpenAPI description of a server, from its routes; what a request may hold that this server reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.routing import BaseRoute, Route

from nano_coder import __version__
from nano_coder.serve import anthropic, chat, completions, responses
from nano_coder.serve.given_reward import MOST_REWARD
from nano_coder.serve.request import SHAPING, BadRequest, Body

JsonSchema = dict[str, Any]
_TEXT: JsonSchema = {"type": "string"}
_FLAG: JsonSchema = {"type": "boolean"}
_OBJECT: JsonSchema = {"type": "object"}
_IDS: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_LENGTH: JsonSchema = {"type": "integer", "minimum": 1, "maximum": 1 << 31}
_TEXTS: JsonSchema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_CHOICE: JsonSchema = {"anyOf": [{"enum": ["auto", "none"]}, _OBJECT]}


def _object(required: Iterable[str] = (), **properties: JsonSchema) -> JsonSchema:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: JsonSchema, at_least: int = 0) -> JsonSchema:
    return {"type": "array", "items": items, "minItems": at_least}


def _number(low: float, high: float, kind: str = "number") -> JsonSchema:
    return {"type": kind, "minimum": low, "maximum": high}


_CONTENT: JsonSchema = {
    "anyOf": [_TEXT, _list(_object(["type", "text"], type={"const": "text"}, text=_TEXT))]
}
_FUNCTION = {"name": {"type": "string", "minLength": 1}, "description": _TEXT}
_STOP: JsonSchema = {"anyOf": [{"type": "string", "minLength": 1}, _TEXTS]}
_SAMPLING: dict[str, JsonSchema] = {
    "model": _TEXT, "stream": _FLAG, "return_token_ids": _FLAG, "stop": _STOP,
    "temperature": _number(0, 100), "top_p": _number(1e-6, 1), "top_k": _number(-1, 1 << 31, "integer"),
    "seed": _number(-(1 << 63), 1 << 63, "integer"), "allowed_token_ids": _IDS,
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    **{
        name: _number(low, high, "integer" if kind is int else "number")
        for name, (kind, low, high) in SHAPING.items()
    },
}  # fmt: skip
_LOGPROBS = {
    "top_logprobs": _number(0, chat.MOST_TOP_LOGPROBS, "integer"), "return_tokens_as_token_ids": _FLAG,
}  # fmt: skip
_STREAM = {"stream_options": _object(include_usage=_FLAG)}


def _message(roles: Iterable[str], **more: JsonSchema) -> JsonSchema:
    return _object(["role", "content"], role={"enum": list(roles)}, content=_CONTENT, **more)


_MESSAGES = {
    "messages": _list(_message(anthropic.ROLES), 1), "system": _CONTENT,
    "tools": _list(_object(["name", "input_schema"], **_FUNCTION, input_schema=_OBJECT)),
}  # fmt: skip
_CALLED = _object(["name"], **_FUNCTION, parameters=_OBJECT)
_CALL = _object(["function"], id=_TEXT, function=_object(["name"], name=_TEXT, arguments=_TEXT))
_NAME = {"lora_name": _TEXT}
_BODIES: dict[str, JsonSchema] = {
    "chat/completions": _object(
        ["messages"], **_SAMPLING, **_LOGPROBS, **_STREAM, logprobs=_FLAG, add_generation_prompt=_FLAG,
        continue_final_message=_FLAG, tool_choice=_CHOICE,
        messages=_list(_message(chat.ROLES, tool_calls=_list(_CALL), tool_call_id=_TEXT), 1),
        tools=_list(_object(["function"], type={"const": "function"}, function=_CALLED)),
        max_tokens=_LENGTH, max_completion_tokens=_LENGTH, response_format=_OBJECT,
        n=_number(1, chat.MOST_CHOICES, "integer"),
    ),
    "completions": _object(
        ["prompt"], **_SAMPLING, **_STREAM, echo=_FLAG, return_tokens_as_token_ids=_FLAG,
        prompt={"anyOf": [_TEXT, _IDS, _list(_TEXT), _list(_IDS)]}, max_tokens=_number(0, 1 << 31, "integer"),
        n=_number(1, completions.MOST_CHOICES, "integer"), best_of=_number(1, 1, "integer"),
        logprobs=_number(0, completions.MOST_LOGPROBS, "integer"),
    ),
    "responses": _object(
        ["input"], **_SAMPLING, **_LOGPROBS, instructions=_TEXT, max_output_tokens=_LENGTH,
        include=_list(_TEXT),
        input={"anyOf": [_TEXT, _list(_message(responses.ROLES, type={"const": "message"}), 1)]},
        tools=_list(_object(["type", "name"], type={"const": "function"}, **_FUNCTION, parameters=_OBJECT)),
        tool_choice=_CHOICE, text=_object(format=_OBJECT),
    ),
    "messages": _object(
        ["messages", "max_tokens"], **_SAMPLING, **_MESSAGES, max_tokens=_LENGTH, stop_sequences=_TEXTS,
        tool_choice=_OBJECT, output_config=_object(format=_OBJECT), output_format=_OBJECT,
    ),
    "count_tokens": _object(
        ["messages"], **_MESSAGES, model=_TEXT, tool_choice=_OBJECT, output_config=_object(format=_OBJECT)
    ),
    "tokenize": _object(
        [], model=_TEXT, prompt=_TEXT, add_special_tokens=_FLAG, return_token_strs=_FLAG,
        messages=_list(_message(chat.ROLES), 1), add_generation_prompt=_FLAG, continue_final_message=_FLAG,
        tools=_list(_object(["function"], type={"const": "function"}, function=_CALLED)), tool_choice=_CHOICE,
    ),
    "detokenize": _object(["tokens"], model=_TEXT, tokens=_IDS),
    "reward": _object(
        ["reward"], reward=_number(-MOST_REWARD, MOST_REWARD), components=_OBJECT, replace=_FLAG
    ),
    "load_lora_adapter": _object(["lora_name", "lora_path"], **_NAME, lora_path=_TEXT, load_inplace=_FLAG),
    "unload_lora_adapter": _object(["lora_name"], **_NAME),
}  # fmt: skip
"""what a request may hold, by the end of the path: `check_fields` refuses anything else"""
IGNORED = frozenset({
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
    "suffix": "this model does not fill in the middle",
    "best_of": "this server samples no more than it answers; send n",
    "chat_template_kwargs": "the template of the policy takes none",
    "chat_template": "the policy has a template of its own",
    "functions": "send tools",
    "guided_json": "send response_format", "structured_outputs": "send response_format",
}  # fmt: skip
"""field -> why it is not served, or what is"""


def check_fields(end: str, body: Body, ends: frozenset[int] = frozenset()) -> None:
    """Raises BadRequest for a field that this server does not read and that may change the answer.

    `ends` are the tokens at which every turn ends, so that to name them as `stop_token_ids` changes nothing.
    """
    read = _BODIES[end]["properties"]
    for name, value in body.items():
        if name in read or name in IGNORED or value is None or value in ("", [], {}):
            continue
        if name == "stop_token_ids" and isinstance(value, list) and all(token in ends for token in value):
            continue
        if value not in _NEUTRAL.get(name, ()):
            why = f"{name!r:.100} is not served here, and may change the answer"
            raise BadRequest(f"{why}: {_INSTEAD.get(name, 'leave it out')}", param=name[:100])


_ERRORS = {
    "OpenAIError": _object(
        ["error"],
        error=_object(["message", "type", "param", "code"], message=_TEXT, type=_TEXT),
    ),
    "AnthropicError": _object(
        ["type", "error"],
        type={"const": "error"},
        error=_object(["message", "type"], message=_TEXT, type=_TEXT),
    ),
}


def openapi(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The description of these routes, of OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            paths[route.path_format] = dict(_operations(route))
    return {
        "openapi": "3.1.0", "info": {"title": "nano-coder serve", "version": __version__}, "paths": paths,
        "components": {"schemas": _ERRORS},
    }  # fmt: skip


def _operations(route: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    path = route.path_format
    named = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in route.param_convertors
    ]
    error = "AnthropicError" if "/messages" in path else "OpenAIError"
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    end = max((end for end in _BODIES if path.endswith(f"/{end}")), key=len, default="")
    kinds = ("text/plain",) if path == "/metrics" else ("application/json", "text/event-stream")
    operation: dict[str, Any] = {
        "parameters": named,
        "responses": {
            "200": {"description": "the answer", "content": {kind: {} for kind in kinds}},
            "default": {"description": "a refusal", "content": refusal},
        },
    }
    if end:
        content = {"application/json": {"schema": _BODIES[end]}}
        operation["requestBody"] = {"required": True, "content": content}
    for method in sorted((route.methods or set()) - {"HEAD"}):
        yield method.lower(), operation
