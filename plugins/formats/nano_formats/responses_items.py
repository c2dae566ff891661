"""Items of OpenAI's Responses API, in which NeMo Gym, Codex and others write what a model did."""

from __future__ import annotations

import json
from typing import Any

from nano_formats.token_triple import triple_of
from nano_formats.transcript import Transcript
from nano_shared.errors import Refused
from nano_shared.strict_json import Row, parse_json
from nano_shared.types import Role

TRIPLE = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_OWN = frozenset({"web_search_call", "local_shell_call", "file_search_call", "tool_search_call"})
"""calls whose name is their type"""


def take_item(transcript: Transcript, item: Row, model: str | None = None) -> None:
    """Add an item to a transcript. Raises Refused for one that is malformed or of a type nobody knows."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role == "assistant":
            text = text_of(item.get("content"), "content")
            step = transcript.step(model=model)
            step.said += [text] if text else []
        elif role in _ROLES:
            transcript.tell(_ROLES[role], text_of(item.get("content"), "content"))
        else:
            raise Refused("role", f"must be system, developer, user or assistant, not {role!r:.40}")
    elif kind == "reasoning":
        text = text_of(item.get("content") or item.get("summary") or [], "summary")
        step = transcript.step(model=model)
        step.reasoned += [text] if text else []
    elif kind in _CALLS:
        arguments = arguments_of(item.get(_CALLS[kind]), _CALLS[kind])
        step = transcript.step(model=model)
        transcript.call(step, _name(item, "call_id"), _name(item, "name"), arguments)
    elif kind in _OUTPUTS:
        transcript.answer(_name(item, "call_id"), text_of(_plain(item.get("output")), "output"))
    elif kind in _OWN:
        step = transcript.step(model=model)
        action = item.get("action")
        name = item.get("call_id") or item.get("id") or f"{kind}_{len(step.calls)}"
        transcript.call(step, str(name), str(kind), action if isinstance(action, dict) else {})
    else:
        raise Refused("type", f"{kind!r:.60} is no item that this program knows")
    triple = triple_of(item, TRIPLE)
    if triple is not None and transcript.steps:  # it belongs to the whole call of the model
        transcript.steps[-1].triple = triple


def text_of(content: Any, field: str) -> str:
    """Text, or the texts of parts; what is no text leaves a mark. Raises Refused."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise Refused(field, f"must be text or a list of parts, not {type(content).__name__}")
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise Refused(f"{field}.{number}", "must be an object with a type")
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            texts.append(f"[{part.get('type', 'part')} left out]")
    return "\n".join(texts)


def arguments_of(value: Any, field: str) -> dict[str, Any]:
    """Arguments by name, out of an object or its JSON; other text is the one argument `input`."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise Refused(field, f"must be an object or its JSON, not {type(value).__name__}")
    try:
        parsed = parse_json(value) if value.strip() else {}
    except Refused:
        return {"input": value}
    return parsed if isinstance(parsed, dict) else {"input": value}


def _plain(output: Any) -> Any:
    """The output of a tool: some write an object with the text in it."""
    if isinstance(output, dict):
        return output["content"] if isinstance(output.get("content"), str | list) else json.dumps(output)
    return output


def _name(item: Row, field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise Refused(field, "is missing" if field not in item else f"must be text, not {value!r:.40}")
    return value
