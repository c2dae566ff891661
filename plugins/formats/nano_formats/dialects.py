"""Dialects of further model families: how each marks, separates and writes its tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from nano_coder.agent.dialects.dialect import Parsed
from nano_coder.agent.dialects.native import (
    HERMES,
    HERMES_JSON,
    Frame,
    Native,
    Pair,
    call_object,
    dumps,
    json_frame,
    one_each,
    plain,
    read_objects,
    refuse,
    tag,
    xml_frame,
)
from nano_coder.agent.dialects.untagged import arguments_of, python_call, read_json, read_python_calls
from nano_shared.types import ToolCall, ToolSpec


def named_frame(name: str, separator: str, after: str = "") -> Callable[..., Frame]:
    """Reads a name by pattern, a separator by pattern, and JSON arguments."""
    head = re.compile(rf"\s*(?:{name})(?:{separator})")

    def read(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
        found = head.match(text, start)
        if found is None:
            raise ValueError("the tool call does not name its function")
        value, end = read_json(text, found.end(), repairs)
        if after and (tail := re.compile(after).match(text, end)):
            end = tail.end()
        return [ToolCall(name=found["name"], arguments=arguments_of(value, repairs))], end

    return read


NAME = r"(?P<name>[^\s<\[{(]+)"
_read_named = named_frame(NAME, r"\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)")
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"


def _mistral_frame(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
    """Reads either of Mistral's forms: JSON objects, or a name and its arguments."""
    after = _SPACE.match(text, start)
    if text[after.end() : after.end() + 1] in ("[", "{"):  # type: ignore[union-attr]
        return read_objects(text, start, tools, repairs)
    try:
        return _read_named(text, start, tools, repairs)
    except ValueError:
        late = _LATE_LIST.search(text, start)
        if late is None:
            raise
        repairs.append("text_before_call")
        return read_objects(text, late.end(), tools, repairs)


_SPACE = re.compile(r"\s*")
_LATE_LIST = re.compile(r"(?=\[\s*\{)")


def _python_lines(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
    """Reads calls up to the end of a fenced block."""
    calls, end = read_python_calls(text, start, tools, repairs)
    while _ANOTHER_CALL.match(text, end):
        more, end = read_python_calls(text, end, tools, repairs)
        calls += more
    return calls, end


_ANOTHER_CALL = re.compile(r"\s*\n[ \t]*[A-Za-z_][\w.]*\(")


def _python_frame(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
    calls, end = read_python_calls(text, start, tools, repairs)
    tag = re.compile(r"\s*<\|(?:python_end|tool_call_end)\|>").match(text, end)
    return calls, tag.end() if tag else end


def all_in_one(form: Callable[[Sequence[ToolCall]], str]) -> Callable[..., Iterator[str]]:
    def write(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> Iterator[str]:
        yield form(calls)

    return write


def call_list(calls: Sequence[ToolCall]) -> str:
    return dumps([{"name": call.name, "arguments": call.arguments} for call in calls])


_GLM_NAME = re.compile(r"\s*([^\s<]+)")
_GLM_PAIR = Pair(
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    "</arg_value>",
    re.compile(r"\s*(?:<arg_key>(.*?)</arg_key>|(?:</tool_call>\s*)?(?:\Z|<tool_call>))", re.DOTALL),
    re.compile(r"\s*</tool_call>"),
    ("<tool_call>", "<arg_value>"),
)


def _glm_call(_: int, call: ToolCall) -> str:
    refuse(call, "</arg_value>", "<arg_value>")
    pairs = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in call.arguments.items()
    )
    return f"{call.name}\n{''.join(pairs)}"


class _Kimi(Native):
    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"


GLM = replace(
    HERMES_JSON,
    name="glm",
    howto="<tool_call>NAME <arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>",
    tags=("<tool_call>", "</tool_call>"),
    read=xml_frame(_GLM_NAME, _GLM_PAIR, ""),
    write=one_each(_glm_call),
)
GLM_4 = Native(
    name="glm-4",
    howto="the function's name on a line, then its arguments as a JSON object",
    starts=re.compile(r"(?m)^(?=[A-Za-z_][\w.-]*\n\s*\{)"),
    read=named_frame(NAME, r"\n\s*(?=\{)"),
    write=one_each(lambda _, call: f"{call.name}\n{dumps(call.arguments)}"),
)  # fmt: skip
LLAMA_3 = Native(
    name="llama-3",
    howto='{"name": "...", "parameters": {...}}',
    gaps=("\n", "; "),
    starts=re.compile(
        r"(?:(?m:^)|(?<=;))[ \t]*(?:<\|python_tag\|>\s*)?"
        r'(?=\{\s*"(?:name|type|function|parameters)"\s*:)'
    ),
    inline=re.compile(r'(?=\{\s*"name"\s*:\s*"(?P<name>[^"\n]+)"\s*,\s*"(?:parameters|arguments)"\s*:)'),
    read=json_frame("parameters"),
    write=one_each(call_object("parameters")),
)  # fmt: skip
PYTHONIC = Native(
    name="pythonic",
    howto='[NAME(KEY="value")]',
    starts=re.compile(r"(?m)^(?:<\|python_start\|>|<\|tool_call_start\|>)?(?=\[\s*[A-Za-z_][\w.]*\()"),
    inline=re.compile(
        r"<\|(?:python|tool_call)_start\|>(?=\[\s*(?P<tagged>[A-Za-z_][\w.]*)\()"
        r"|(?=\[\s*(?P<listed>[A-Za-z_][\w.]*)\(\s*(?:\)|[A-Za-z_]\w*\s*=))"
        r"|(?m:^)(?=(?P<bare>[A-Za-z_][\w.]*)\(\s*(?:\)|[A-Za-z_]\w*\s*=))"
    ),
    read=_python_frame,
    write=all_in_one(lambda calls: f"[{', '.join(map(python_call, calls))}]"),
)  # fmt: skip
GEMMA = Native(
    name="gemma",
    howto='```tool_code\nNAME(KEY="value")\n```',
    tags=("```tool_code\n", "\n```"), starts=tag("```tool_code\n"),
    inline=re.compile(r"```(?:python|py)?[ \t]*\n(?=(?P<name>[A-Za-z_]\w*)\()"),
    read=_python_lines,
    write=one_each(lambda _, call: python_call(call)),
    markers=("```tool_code\n",),
)  # fmt: skip
MISTRAL = Native(
    name="mistral",
    howto='[TOOL_CALLS] [{"name": "...", "arguments": {...}}]',
    tags=("[TOOL_CALLS]", ""), starts=tag("[TOOL_CALLS]"), gaps=("", "\n"), markers=("[TOOL_CALLS]",),
    read=_mistral_frame,
    write=all_in_one(lambda calls: " " + call_list(calls)),
)  # fmt: skip
MISTRAL_ARGS = replace(
    MISTRAL,
    name="mistral-args",
    howto="[TOOL_CALLS]NAME[ARGS]{...}",
    gaps=("", ""),
    write=one_each(lambda _, call: f"{call.name}[ARGS]{dumps(call.arguments)}"),
)
PHI = replace(
    MISTRAL,
    name="phi",
    howto='<|tool_call|>[{"name": "...", "arguments": {...}}]<|/tool_call|>',
    tags=("<|tool_call|>", "<|/tool_call|>"), markers=("<|tool_call|>", "functools"), read=read_objects,
    starts=re.compile(r"<\|tool_call\|>|functools(?=\s*\[)"),
    write=all_in_one(call_list),
)  # fmt: skip
DEEPSEEK = Native(
    name="deepseek",
    howto=f"{_DEEPSEEK_BEGIN}NAME{_DEEPSEEK_SEP}{{...}}<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    tags=(_DEEPSEEK_BEGIN, "<｜tool▁call▁end｜>"), gaps=("", ""),
    starts=re.compile(
        f"(?:<｜tool▁calls▁begin｜>\\s*)?{_DEEPSEEK_BEGIN}|<｜tool▁calls▁begin｜>(?=\\w+{_DEEPSEEK_SEP})"
    ),
    markers=("<｜tool▁calls▁begin｜>", _DEEPSEEK_BEGIN),
    read=named_frame(
        rf"(?:function{_DEEPSEEK_SEP})?(?P<name>[^\s<{{]+)", rf"(?:{_DEEPSEEK_SEP}|\s*```json\s*)+", r"\s*```"
    ),
    write=one_each(lambda _, call: f"{call.name}{_DEEPSEEK_SEP}{dumps(call.arguments)}"),
)  # fmt: skip
DEEPSEEK_3 = replace(
    DEEPSEEK,
    name="deepseek-3",
    howto=f"{_DEEPSEEK_BEGIN}function{_DEEPSEEK_SEP}NAME and the arguments in a ```json block",
    gaps=("", "\n"),
    write=one_each(
        lambda _, call: f"function{_DEEPSEEK_SEP}{call.name}\n```json\n{dumps(call.arguments)}\n```"
    ),
)
KIMI = _Kimi(
    name="kimi",
    howto="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    tags=("<|tool_call_begin|>", "<|tool_call_end|>"), gaps=("", ""),
    starts=re.compile(r"(?:<\|tool_calls?_section_begin\|>\s*)?<\|tool_call_begin\|>"),
    markers=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    read=named_frame(r"(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?", r"\s*<\|tool_call_argument_begin\|>"),
    write=one_each(
        lambda n, call: f"functions.{call.name}:{n}<|tool_call_argument_begin|>{dumps(call.arguments)}"
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------- harmony, of gpt-oss

_HEADER = re.compile(r"(?:<\|start\|>assistant)?((?:(?!<\|message\|>).)*?)<\|message\|>", re.DOTALL)
_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
_NOTHING = re.compile(r"\s*(?:<\||\Z)")
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NEXT = "<|start|>assistant"


class Harmony:
    name = "harmony"
    howto = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}"
    markers = ("<|channel|>", "<|start|>")

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        reasoning: list[str] = []
        thought: list[str] = []
        calls: list[ToolCall] = []
        repairs: list[str] = []
        error: str | None = None
        at = 0
        while error is None and (header := _HEADER.match(text, at)):
            channel, target = _CHANNEL.search(header[1]), _TO.search(header[1])
            at = header.end()
            if target:
                try:
                    value, at = (None, at) if _NOTHING.match(text, at) else read_json(text, at, repairs)
                    calls.append(ToolCall(name=target[1], arguments=arguments_of(value, repairs)))
                except ValueError as problem:
                    error = f"{problem}; write {self.howto}"
            end = _END.search(text, at)
            assert end is not None  # it matches the end of the text
            if not target:
                said = reasoning if channel and channel[1] == "analysis" else thought
                said.append(text[at : end.start()])
            at = end.end()
        if text[at:].strip() and error is None:
            thought.append(text[at:])
        prose = not calls and error is None
        if prose:
            error = f"no tool call found; write {self.howto}"
        return Parsed(
            thought="\n".join(thought),
            reasoning="\n".join(reasoning),
            calls=() if error else tuple(calls),
            error=error,
            repairs=() if error else tuple(dict.fromkeys(repairs)),
            prose=prose and any(map(str.strip, thought)),
        )

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        if "<|" in thought:
            raise ValueError("a thought cannot hold control tokens")
        if not calls:
            return f"<|channel|>final<|message|>{thought}"
        said = f"<|channel|>commentary<|message|>{thought}<|end|>{_NEXT}" if thought else ""
        return said + f"<|call|>{_NEXT}".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            + json.dumps(call.arguments, ensure_ascii=False)
            for call in calls
        )

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return HERMES.describe(tools)


HARMONY = Harmony()
