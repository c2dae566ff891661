"""Calls without the dialect's own tags: JSON objects, bare, in fenced blocks or in other tags.

An object is a call if it names an offered tool and its arguments fit that tool's schema. Blocks are of four
forms, and where an answer has several, only the clearest form is read: what is quoted in prose beside a
tagged call is an example. So is a block whose sentence says so.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_coder.agent.dialects.dialect import find_tool, settled, types_of
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
    given = value.get("parameters")  # arguments, or a schema of them
    schema = given is None or (isinstance(given, dict) and "properties" in given)
    if "description" in value and "arguments" not in value and schema:
        raise ValueError("this is the description of a tool, and no call")
    found = next((name for name in (key, *ARGUMENTS) if name in value), key)
    if found != key:
        repairs.append(f"{found}_for_{key}")
    if set(value) - _EXPECTED:
        repairs.append("extra_keys")
    return ToolCall(name=value["name"], arguments=arguments_of(value.get(found), repairs))


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
    types = types_of(name, spec)
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


_OPENING = re.compile(
    r"(?P<fence>`{3,9}|~{3,9})[ \t]*[\w.+-]*[ \t]*\n?\s*(?:<[a-z_]+>\s*)?"
    r"|<(?P<tag>tools?|tool_calls?|function_calls?|functions?|json)>\s*(?:`{3,9}[ \t]*\w*[ \t]*\n\s*)?"
    r"|(?m:^)[ \t]*(?P<bare>(?=[{\[]))"
    r"|(?P<inline>(?=\{\s*[\"']|\[\s*\{\s*[\"']))"
)
_FORMS = ("tag", "fence", "bare", "inline")
"""clearest first"""
_REPAIRS = {"tag": "other_tag", "fence": "fenced_block", "bare": "missing_tags", "inline": "inline_call"}
_POSSIBLE = re.compile(r"`{3}|~{3}|<(?:tool|function|json)|\{(?=[\s\"']|$)|\[(?=\s*\{|\s*$)")
_MARKS = ("```", "~~~", "<tool", "<function", "<json")
_BETWEEN = re.compile(r"[\s,;]*(?=[{\[])")
_CLOSED = {
    "fence": re.compile(r"\s*(?:</[a-z_]+>\s*)?(?:`{3,9}|~{3,9}|\Z)"),
    "tag": re.compile(r"\s*(?:`{3,9}\s*)?(?:</?[a-z_]+>|\Z)"),
    "bare": re.compile(r"[ \t.]*(?:\n|\Z)"),
    "inline": re.compile(r"[ \t.`]*(?:\n|\Z)"),
}
"""what must follow a block's last value"""
_EXAMPLE = re.compile(
    r"\b(?:e\.g\.|(?:examples?|for instance|looks? like|such as|instead of|rather than|syntax|placeholder"
    r"|do not|don't|never|avoid)\b)(?![^.!?\n]*[.!?]\s)",
    re.IGNORECASE,
)
"""words of the sentence before a block that is shown and not meant"""
_FENCE_END = re.compile(r"[`~]{3,9}[\w.+-]*\s*\Z")
_LEAD = 400
"""characters before a block among which its sentence is looked for"""
_NAMES = ("name", "tool", "tool_name", "function", "function_name", "action")
_GIVEN = (*ARGUMENTS, "args", "params", "input", "tool_input", "action_input", "kwargs")
_MOST_FAILURES = 64
"""openings that hold no JSON, after which a text is not searched further: each may cost its whole length"""
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str, int, float), "integer": (int, str), "number": (int, float, str), "boolean": (bool, str),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip
"""a number may stand for a string, and a string for a number: tools read both"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """JSON values of an answer that stand together."""

    form: str
    start: int
    end: int
    values: tuple[Any, ...] = ()
    repairs: tuple[str, ...] = ()
    is_example: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Untagged:
    """The calls of a text, and where the first begins."""

    start: int
    calls: tuple[ToolCall, ...]
    repairs: tuple[str, ...]


@dataclass(slots=True)
class _BlockReader:
    text: str
    form: str
    values: list[Any] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    def read(self, start: int) -> int:
        """The end of the block that begins there. Raises ValueError for one that is not JSON alone."""
        if self.text[start : start + 1] not in ("{", "["):
            raise ValueError("no JSON")
        end = start
        try:
            while (more := _BETWEEN.match(self.text, end)) or end == start:
                value, end = read_json(self.text, more.end() if more else start, self.repairs)
                self.values.append(value)
        except ValueError:
            end = self._unclosed(start)
        closed = _CLOSED[self.form].match(self.text, end)
        if closed is None:
            raise ValueError("text follows the JSON")
        return closed.end()

    def _unclosed(self, start: int) -> int:
        """The end of one value whose last brackets are missing before the block's end. Raises ValueError."""
        close = re.compile(r"\n?`{3,9}|\s*</[a-z_]+>").search(self.text, start)
        if self.values or close is None or self.form not in ("fence", "tag"):
            raise ValueError("no JSON")
        for missing in ("}", "}}", "}]", "}}]"):
            body = self.text[start : close.start()].rstrip() + missing
            with_it: list[str] = []
            try:
                value, end = read_json(body, 0, with_it)
            except ValueError:
                continue
            if end == len(body):
                self.values.append(value)
                self.repairs += [*with_it, "closed_brackets"]
                return close.start()
        raise ValueError("no JSON")


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a text in their order; a block that holds anything beside JSON has no values."""
    at, failures, lead = 0, 0, 0
    while failures < _MOST_FAILURES and (opening := _OPENING.search(text, at)):
        form = str(opening.lastgroup)
        reading = _BlockReader(text, form)
        start = opening.start()
        try:
            at = reading.read(opening.end())
            yield Block(
                form=form, start=start, end=at, values=tuple(reading.values),
                repairs=(_REPAIRS[form], *reading.repairs), is_example=is_example(text[lead:start]),
            )  # fmt: skip
            lead = at
        except ValueError:
            failures += 1
            at = _after(text, opening)
            yield Block(form=form, start=start, end=at)


def _after(text: str, opening: re.Match[str]) -> int:
    """Where the search goes on after a block that is no JSON."""
    begin = opening.end() + (opening.start() == opening.end())
    match opening.lastgroup:
        case "fence":
            close = re.compile(rf"[^\n`]*`{{3}}|.*?\n{opening['fence']}", re.DOTALL)
            end = close.match(text, opening.start() + len(opening["fence"]))
            return end.end() if end else len(text)
        case "bare":  # code, or JSON that is broken: what it holds is no call of its own
            return at if (at := text.find("\n\n", begin)) >= 0 else len(text)
    return begin


def is_example(before: str) -> bool:
    """Whether the sentence that leads to a block says that it is an example."""
    lead = _FENCE_END.sub("", before[-_LEAD:]).rstrip().rpartition("\n")[2]
    return _EXAMPLE.search(lead) is not None


def untagged_calls(text: str, tools: Sequence[ToolSpec]) -> Untagged | None:
    """The calls of a text that are beyond doubt; None for none. Of equal calls in a row, one is read."""
    found: list[tuple[Block, list[ToolCall], list[str]]] = []
    for block in blocks(text):
        repairs: list[str] = []
        called = [_calls(value, tools, repairs) for value in block.values]
        if called and all(called) and not block.is_example:
            found.append((block, [call for calls in called for call in calls], [*block.repairs, *repairs]))
    if not found:
        return None
    clearest = min(_FORMS.index(block.form) for block, _, _ in found)
    found = [entry for entry in found if entry[0].form == _FORMS[clearest]]
    every = [call for _, called, _ in found for call in called]
    calls = [call for before, call in zip([None, *every], every, strict=False) if call != before]
    repairs = [repair for _, _, noted in found for repair in noted]
    if len(calls) < len(every):
        repairs.append("repeated_call")
    if text[found[-1][0].end :].strip():
        repairs.append("text_after_call")
    return Untagged(start=found[0][0].start, calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs)))


def _calls(value: Any, tools: Sequence[ToolSpec], repairs: list[str]) -> list[ToolCall]:
    """The calls that a value is; none for any other value."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    several = value if isinstance(value, list) else [value]
    try:
        return [_call(one, tools, repairs) for one in several]
    except ValueError:
        return []


def _call(value: Any, tools: Sequence[ToolSpec], repairs: list[str]) -> ToolCall:
    """The call that an object is. Raises ValueError with what is wrong with it."""
    noted: list[str] = []
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    if isinstance(value.get("function"), dict):
        noted.append("function_wrapper")
        value = value["function"]
    key = next((key for key in _NAMES if isinstance(value.get(key), str)), None)
    if key is None:
        raise ValueError("it names no tool")
    name = value[key].removeprefix("functions.")
    spec = find_tool(name, tools)
    if spec is None:
        raise ValueError(f"unknown tool {name}; the tools are {', '.join(tool.name for tool in tools)}")
    if "description" in value or "properties" in (value.get("parameters") or ()):
        raise ValueError("it describes a tool and calls none")
    given = next((each for each in _GIVEN if each in value), None)
    if given is not None:
        noted += [f"{given}_for_arguments"] * (given != "arguments")
        noted += ["extra_keys"] * bool(set(value) - {key, given, "id", "type"})
        arguments = arguments_of(value[given], noted)
    else:
        noted.append("flat_arguments")
        arguments = {k: v for k, v in value.items() if k not in (key, "id", "type")}
        if set(arguments) - set(_properties(spec)) or not arguments:
            raise ValueError("it has no arguments")
    call = ToolCall(name=name, arguments=_fitted(arguments, spec, noted))
    repairs += noted
    return call


def _properties(spec: ToolSpec) -> dict[str, Any]:
    found: dict[str, Any] = spec.parameters.get("properties", {})
    return found


def _fitted(arguments: dict[str, Any], spec: ToolSpec, repairs: list[str]) -> dict[str, Any]:
    """Arguments that fit the tool's schema, numbers as text where it takes text. Raises ValueError."""
    known, required = _properties(spec), spec.parameters.get("required", [])
    if missing := [name for name in required if name not in arguments]:
        raise ValueError(f"{spec.name}: {missing[0]} is missing")
    if arguments and not set(arguments) & set(known):
        raise ValueError(f"{spec.name} has no argument {next(iter(arguments))}")
    fitted = {}
    for name, value in arguments.items():
        types = _types(name, spec)
        absent = value is None and name not in required
        kinds = tuple(kind for each in types for kind in _JSON_TYPES[each])
        if types and not absent and not isinstance(value, kinds):
            raise ValueError(f"{spec.name}: {name} must be a {' or '.join(sorted(types))}")
        as_text = "string" in types and type(value) in (int, float) and not types & {"integer", "number"}
        repairs += ["number_for_text"] * as_text
        fitted[name] = json.dumps(value) if as_text else value
    return fitted


def _types(name: str, spec: ToolSpec) -> set[str]:
    """JSON types that a parameter accepts; none where its schema says none, or others."""
    named = types_of(name, spec)
    return named if named <= set(_JSON_TYPES) else set()


def settled_before_call(text: str) -> int:
    """The length of a growing text before anything that may become an untagged call."""
    possible, end = _POSSIBLE.search(text), len(settled(text, _MARKS))
    end = min(end, possible.start()) if possible else end
    return end - text[:end].endswith("\n")  # a newline before a call is not part of the thought


_SHELLS = ("shell", "bash")
_SHELL_BLOCK = re.compile(
    r"(?:```|~~~)(?:bash|sh|shell|console|zsh)[ \t]*\n((?:(?!```|~~~).)*?)\n?(?:```|~~~|\Z)\s*\Z", re.DOTALL
)
_LONE = 150
"""most characters before a block of shell that is meant as a call, and not part of an account"""
_TAGS = re.compile(r"(?m:^)[ \t]*</?(?:tool_calls?|tools?|function_calls?)\b|<function=")


def missed_call(text: str, tools: Sequence[ToolSpec]) -> tuple[str, ToolCall] | None:
    """What is wrong with something like a call that could not be read, and a whole call as an example. None
    for a text without any."""
    shell = next((tool.name for tool in tools if tool.name in _SHELLS), None)
    block = _SHELL_BLOCK.search(text)
    if shell and block and len(text[: block.start()].strip()) <= _LONE:
        return "a command in a block is no call", ToolCall(name=shell, arguments={"command": block[1]})
    names = "|".join(re.escape(tool.name) for tool in tools)
    keys = "|".join(_NAMES)
    naming = rf"""["'](?:{keys})["']\s*:\s*["']({names})["']|^[^\w\n]{{0,9}}({names})\(.*\)\W{{0,9}}$"""
    named = {a or b for a, b in re.findall(naming, text, re.MULTILINE)} if names else set()
    wrong = [why for block in blocks(text) for value in block.values for why in _wrongs(value, tools)]
    if not (named or wrong or _TAGS.search(text)):
        return None
    why = (wrong or ["it is no whole JSON object of a call"])[0]
    return why, example_call(tools, named.pop() if len(named) == 1 else None)


def _wrongs(value: Any, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """Why an object that is written as a call is none that can be made."""
    for one in value if isinstance(value, list) else [value]:
        inner = one.get("function", one) if isinstance(one, dict) else None
        if isinstance(inner, dict) and any(key in inner for key in _GIVEN):
            try:
                _call(one, tools, [])
                yield "it is shown as an example"
            except ValueError as problem:
                yield str(problem)


def example_call(tools: Sequence[ToolSpec], name: str | None = None) -> ToolCall:
    """A whole call: of the tool of that name, else of the shell, else of the first tool."""
    chosen = name or next((tool.name for tool in tools if tool.name in _SHELLS), tools[0].name)
    spec = find_tool(chosen, tools) or tools[0]
    if spec.name in _SHELLS:
        return ToolCall(name=spec.name, arguments={"command": "ls"})
    required = spec.parameters.get("required") or list(_properties(spec))[:1]
    values = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    kinds = {key: next(iter(_types(key, spec) & set(values)), "") for key in required}
    texts = {key: "main.py" if key == "path" else key.upper() for key in kinds}
    return ToolCall(name=spec.name, arguments={k: values.get(kind, texts[k]) for k, kind in kinds.items()})


def fenced(call: ToolCall) -> str:
    """A call as the models write it that keep to no tags."""
    return f"```json\n{json.dumps(call.model_dump(), ensure_ascii=False)}\n```"
