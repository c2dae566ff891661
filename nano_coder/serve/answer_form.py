"""The grammar that forces an answer into its form: `response_format` and `tool_choice`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nano_coder.agent.dialects.dialect import Compact, Dialect
from nano_coder.serve.request import AnswerForm, BadRequest
from nano_shared.types import ToolCall, ToolSpec

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
