"""Lenient reading of tool calls: JSON objects and Python calls as models write them, each repair named."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from typing import Any

from nano_coder.agent.dialects.dialect import find_tool
from nano_shared.process import parse_expression
from nano_shared.types import ToolCall, ToolSpec

ARGUMENTS = ("arguments", "parameters")
_EXPECTED = {"name", *ARGUMENTS, "id", "type"}


def read_json(text: str, start: int, repairs: list[str]) -> tuple[Any, int]:
    """The JSON value after optional space, and its end. Raises ValueError."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _decoder().raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError) as problem:
        try:  # raw newlines and tabs in strings
            value, end = _decoder(strict=False).raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            try:  # single quotes, commas before a bracket
                end = _closing(text, start)
                value = _literal(parse_expression(text[start:end]).body)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                raise ValueError(f"the tool call is not JSON ({problem})") from None
            repairs.append("python_literal")
            return value, end
        repairs.append("raw_control_characters")
        return value, end


def _decoder(*, strict: bool = True) -> json.JSONDecoder:
    return json.JSONDecoder(strict=strict, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number")
    return value


def call_of(value: Any, key: str, repairs: list[str]) -> ToolCall:
    """The call that a JSON object describes; `key` is the dialect's name for the arguments."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        repairs.append("function_wrapper")
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('the tool call must be an object with a "name"')
    if "description" in value and not ("arguments" in value or _is_given(value.get("parameters"))):
        raise ValueError("this is the description of a tool, and no call")
    found = next((name for name in (key, *ARGUMENTS) if name in value), key)
    if found != key:
        repairs.append(f"{found}_for_{key}")
    if set(value) - _EXPECTED:
        repairs.append("extra_keys")
    return ToolCall(name=value["name"], arguments=arguments_of(value.get(found), repairs))


def _is_given(parameters: Any) -> bool:
    """Whether parameters are arguments, and not a schema of them."""
    return parameters is not None and not (isinstance(parameters, dict) and "properties" in parameters)


def arguments_of(value: Any, repairs: list[str]) -> dict[str, Any]:
    if isinstance(value, str):
        repairs.append("arguments_as_string")
        value = read_json(value, 0, repairs)[0] if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("the arguments must be an object")
    return value


def typed(text: str, name: str, spec: ToolSpec | None) -> Any:
    """The value of an unquoted argument: a string if the schema allows one."""
    schema = (spec.parameters.get("properties", {}) if spec else {}).get(name, {})
    kinds = [option.get("type") for option in schema.get("anyOf", [schema])]
    types = {str(kind) for one in kinds for kind in (one if isinstance(one, list) else [one])}
    if "string" in types and not (types & {"null"} and text.strip() == "null"):
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def read_python_calls(
    text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]
) -> tuple[list[ToolCall], int]:
    """Calls written as Python, alone or in a list, and their end. Raises ValueError."""
    opening = min((at for at in (text.find("[", start), text.find("(", start)) if at >= 0), default=-1)
    if opening < 0:
        raise ValueError("the tool call is no Python call")
    end = _closing(text, opening)
    try:
        expression = parse_expression(text[start:end].strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(f"the tool call is no Python call ({problem})") from None
    nodes = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression]
    return [_python_call(node, tools, repairs) for node in nodes], end


def python_call(call: ToolCall) -> str:
    """A call as Python. Raises ValueError for an argument that is no identifier."""
    if bad := [key for key in call.arguments if not key.isidentifier()]:
        raise ValueError(f"an argument named {bad[0]!r} cannot be written as Python")
    return f"{call.name}({', '.join(f'{k}={_python(v)}' for k, v in call.arguments.items())})"


def _python(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case dict():
            return "{" + ", ".join(f"{_python(k)}: {_python(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _closing(text: str, opening: int) -> int:
    """The index after the bracket that closes the one at `opening`. Raises ValueError."""
    depth, at = 0, opening
    while at < len(text):
        char = text[at]
        if char in "\"'":
            at = _string_end(text, at)
            continue
        depth += (char in "([{") - (char in ")]}")
        at += 1
        if depth == 0:
            return at
    raise ValueError("the tool call is not closed")


def _string_end(text: str, start: int) -> int:
    quote = text[start] * 3 if text.startswith(text[start] * 3, start) else text[start]
    at = start + len(quote)
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    raise ValueError("a string of the tool call is not closed")


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _python_call(node: ast.AST, tools: Sequence[ToolSpec], repairs: list[str]) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError("the tool call is no Python call")
    name = ast.unparse(node.func)
    if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
        repairs.append("print")
        return _python_call(node.args[0], tools, repairs)
    arguments: dict[str, Any] = {}
    spec = find_tool(name, tools)
    names = list(spec.parameters.get("properties", {})) if spec else []
    for key, value in zip(names, node.args, strict=False):
        arguments[key] = _literal(value)
    if node.args:
        repairs.append("positional_arguments")
        if len(node.args) > len(names):
            raise ValueError(f"{name} takes its arguments by name")
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"{name} takes its arguments by name")
        arguments[keyword.arg] = _literal(keyword.value)
    return ToolCall(name=name, arguments=arguments)


def _literal(node: ast.AST) -> Any:
    """The JSON value of a literal; JSON's own names are read too."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_literal(k)): _literal(v) for k, v in zip(keys, values, strict=True) if k}
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError("an argument of the tool call is no literal") from None
    if not isinstance(value, str | int | float | bool | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise ValueError("an argument of the tool call is no JSON value")
    return value
