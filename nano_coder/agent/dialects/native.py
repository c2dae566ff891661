"""The dialects of open model families, one table: how each marks, separates and writes its tool calls.

Parsing works on text: the ids of control tokens were decoded to their spelling before. Reasoning is split off
first, so that a tag mentioned in it is no call.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from nano_coder.agent.dialects.dialect import Parsed, find_tool, function_schema, settled
from nano_coder.agent.dialects.untagged import (
    ARGUMENTS,
    arguments_of,
    blocks,
    call_of,
    example_call,
    fenced,
    is_example,
    missed_call,
    python_call,
    read_json,
    read_python_calls,
    settled_before_call,
    typed,
    untagged_calls,
)
from nano_shared.types import ToolCall, ToolSpec

Frame = tuple[list[ToolCall], int]
"""the calls between two tags, and where they end in the text"""
_THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """One family's dialect. Text before the first `open` is the thought."""

    name: str
    howto: str
    """how a call is written, for templates that do not say it"""
    tags: tuple[str, str] = ("", "")
    """written around each frame"""
    starts: re.Pattern[str]
    """matches what comes before the body of a frame"""
    inline: re.Pattern[str] | None = None
    """matches what comes before a frame without its tags, if the last group is the name of a tool"""
    read: Callable[[str, int, Sequence[ToolSpec], list[str]], Frame]
    """reads one frame from the index after its start. Raises ValueError"""
    write: Callable[[Sequence[ToolCall], Sequence[ToolSpec]], Iterator[str]]
    """writes the bodies of the frames of several calls"""
    section: tuple[str, str] = ("", "")
    """tags around all frames"""
    gaps: tuple[str, str] = ("\n", "\n")
    """written between thought and first call, and between frames"""
    markers: tuple[str, ...] = ()
    """texts with which a call may begin; empty if only a pattern recognises calls"""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        reasoning, rest = self.reasoning(text, tools)
        first = self._next(rest, tools)
        if first is None or self._quoted(rest, first):
            return self._untagged(reasoning, rest, tools)
        thought = rest[: first.start()].removesuffix(self.gaps[0])
        repairs: list[str] = []
        calls: list[ToolCall] = []
        frame: re.Match[str] | None = first
        end = first.end()
        while frame is not None:
            if frame.re is self.inline:
                repairs.append("inline_call")
            try:
                found, end = self.read(rest, frame.end(), tools, repairs)
            except ValueError as problem:
                error = f"{problem}; write {self.howto}"
                return Parsed(thought=thought, reasoning=reasoning, error=error)
            calls += found
            end = self._closed(rest, end, repairs, tagged=frame.re is not self.inline)
            frame = self._next(rest, tools, end)
            if rest[end : frame.start() if frame else len(rest)].replace(self.section[1], "").strip(" \n;"):
                repairs.append("text_after_call")
        return Parsed(
            thought=thought, reasoning=reasoning, calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs))
        )

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        if self._next(thought, tools) or any(tag in thought for pair in _THINK for tag in pair):
            raise ValueError("a thought cannot hold what looks like a call or a reasoning tag")
        if not calls:
            return thought
        frames = (body.join(self.tags) for body in self.write(calls, tools))
        text = self.gaps[1].join(frames).join(self.section)
        return f"{thought}{self.gaps[0]}{text}" if thought else text

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "\n".join(json.dumps(function_schema(tool), ensure_ascii=False) for tool in tools)

    def call_id(self, name: str, number: int) -> str:
        """The id of the `number`-th call of a conversation, in a form that the family's template takes."""
        return f"functions.{name}:{number}" if self.name == "kimi" else f"call{number:05d}"

    def reasoning(self, text: str, tools: Sequence[ToolSpec]) -> tuple[str, str]:
        """The reasoning, and the text after it. A prompt may have opened the reasoning."""
        for opened, closed in _THINK:
            begins = text.lstrip().startswith(opened)
            at = text.find(closed)
            if at < 0 and begins:
                return text.lstrip()[len(opened) :].strip("\n"), ""
            if at >= 0 and (begins or not self._inside_call(text, at, tools)):
                reasoning = text[:at].lstrip().removeprefix(opened).strip("\n")
                return reasoning, text[at + len(closed) :].lstrip("\n")
        return "", text

    def visible(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        """The reasoning and thought of an unfinished text, up to where a continuation could change them:
        nothing of one that opens no reasoning, which the prompt may have opened."""
        start = text.lstrip()
        opened = next((pair for pair in _THINK if start.startswith(pair[0])), None)
        if opened is None:
            return Parsed()
        if opened[1] not in start:
            return Parsed(reasoning=settled(start.removeprefix(opened[0]), [opened[1]]).strip("\n"))
        reasoning, rest = self.reasoning(text, tools)
        if not self.markers or rest.lstrip()[:1] in ("", "{", "["):  # perhaps a call without its tags
            return Parsed(reasoning=reasoning)
        shown = settled(rest, [before + mark for before in ("", self.gaps[0]) for mark in self.markers])
        return Parsed(reasoning=reasoning, thought=shown[: settled_before_call(shown)])

    def _next(
        self, text: str, tools: Sequence[ToolSpec], start: int = 0, end: int = sys.maxsize
    ) -> re.Match[str] | None:
        found = self.starts.search(text, start, end)
        if self.inline is None:
            return found
        for other in self.inline.finditer(text, start, end):
            if found is not None and found.start() <= other.start():
                break
            if find_tool(other[other.lastgroup or 0], tools):
                return other
        return found

    def _inside_call(self, text: str, at: int, tools: Sequence[ToolSpec]) -> bool:
        """True if the place lies in an argument of a call."""
        end = 0
        while frame := self._next(text, tools, end, at):
            try:
                _, end = self.read(text, frame.end(), tools, [])
            except ValueError:
                return False
            if end > at:
                return True
        return any(block.start < at < block.end for block in blocks(text) if block.values)

    def _closed(self, text: str, end: int, repairs: list[str], *, tagged: bool) -> int:
        """The index after the closing tag. A missing one is noted where the frame was opened."""
        tag = self.tags[1].strip()
        after = end + len(text[end:]) - len(text[end:].lstrip())
        if tag and text.startswith(tag, after):
            return after + len(tag)
        if tag and tagged:
            repairs.append("closed_tag")
        return end

    def _quoted(self, text: str, frame: re.Match[str]) -> bool:
        """Whether what begins like a call of a dialect without tags is an example, or JSON of the task."""
        if self.tags[0] or "<|" in frame[0]:
            return False
        if is_example(text[: frame.start()]):
            return True
        try:
            calls, end = self.read(text, frame.end(), (), [])
        except ValueError:
            return False
        read = text[frame.end() : end]
        return read.startswith("{") and not any(f'"{key}"' in read for key in ARGUMENTS) and bool(calls)

    def _untagged(self, reasoning: str, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        """Calls without the family's tags; else the text is prose, or a call that could not be read."""
        found = untagged_calls(text, tools)
        if found is not None:
            thought = text[: found.start].removesuffix("\n")
            return Parsed(thought=thought, reasoning=reasoning, calls=found.calls, repairs=found.repairs)
        error, missed = f"no tool call found; write {self.howto}", missed_call(text, tools)
        if missed is not None:
            error = f"no tool call could be read: {missed[0]}; write {self.howto}"
        if tools:
            call = missed[1] if missed else example_call(tools)
            error += f", for example:\n{fenced(call) if '```' in text else self.render('', [call], tools)}"
        prose = bool(text.strip()) and missed is None
        return Parsed(thought=text, reasoning=reasoning, error=error, prose=prose)


def _json_frame(key: str) -> Callable[[str, int, Sequence[ToolSpec], list[str]], Frame]:
    """Reads an object, or a list of objects, with `name` and `key`."""

    def read(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
        if fence := _FENCE.match(text, start):
            repairs.append("fenced_block")
            start = fence.end()
        value, end = read_json(text, start, repairs)
        values = value if isinstance(value, list) else [value]
        if fence and (closed := _FENCE_END.match(text, end)):
            end = closed.end()
        return [call_of(value, key, repairs) for value in values], end

    return read


_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n")
_FENCE_END = re.compile(r"\s*```")
_read_objects = _json_frame("arguments")


def _mistral_frame(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
    """Reads either of Mistral's forms: JSON objects, or a name and its arguments."""
    after = _SPACE.match(text, start)
    if text[after.end() : after.end() + 1] in ("[", "{"):  # type: ignore[union-attr]
        return _read_objects(text, start, tools, repairs)
    try:
        return _read_named(text, start, tools, repairs)
    except ValueError:
        late = _LATE_LIST.search(text, start)
        if late is None:
            raise
        repairs.append("text_before_call")
        return _read_objects(text, late.end(), tools, repairs)


_SPACE = re.compile(r"\s*")
_LATE_LIST = re.compile(r"(?=\[\s*\{)")


def _named_frame(name: str, separator: str, after: str = "") -> Callable[..., Frame]:
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


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _one_each(form: Callable[[int, ToolCall], str]) -> Callable[..., Iterator[str]]:
    def write(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> Iterator[str]:
        return (form(number, call) for number, call in enumerate(calls))

    return write


def _all_in_one(form: Callable[[Sequence[ToolCall]], str]) -> Callable[..., Iterator[str]]:
    def write(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> Iterator[str]:
        yield form(calls)

    return write


def _object(key: str) -> Callable[[int, ToolCall], str]:
    return lambda _, call: _dumps({"name": call.name, key: call.arguments})


def _list(calls: Sequence[ToolCall]) -> str:
    return _dumps([{"name": call.name, "arguments": call.arguments} for call in calls])


_XML_NAME = re.compile(r"\s*<function=([^>\n]+)>")
_XML_NEXT = re.compile(r"\n?<parameter=([^>\n]+)>")
_GLM_NAME = re.compile(r"\s*([^\s<]+)")


@dataclass(frozen=True, slots=True)
class _Pair:
    """How a key and its unquoted value are written. A value may hold any text, tags of the dialect too."""

    begin: re.Pattern[str]
    """the key, up to the value"""
    close: str
    """tag behind the value"""
    after: re.Pattern[str]
    """what follows the tag: the next key, or the frame's end before another frame or the end of the text"""
    frame_end: re.Pattern[str]
    """the end of a frame, whatever follows"""
    opening: tuple[str, str]
    """texts before a frame, and before a value"""

    def end(self, text: str, start: int, further: Callable[[str], bool]) -> tuple[int, int]:
        """Where a value ends, and what is behind it begins; both are the same where it was not closed.

        The tag of a pair that the value itself holds does not close it, nor does one that the end of a frame
        follows where another ends below before one begins. Raises ValueError for a value that does not end.
        """
        tags = [(start + m.start(), start + m.end()) for m in re.finditer(self.close, text[start:])]
        strict = [tag for tag in tags if self._is_last(text, tag[1], further)]
        ends = [tag for tag in tags if tag in strict or self.frame_end.match(text, tag[1])]
        frame, opened = self.opening
        fit = [
            tag
            for tag, below in zip(ends, [*ends[1:], None], strict=False)
            if tag in strict or below is None or frame in text[tag[1] : below[0]]
        ]
        whole = (
            tag for tag in fit if text.count(opened, start, tag[0]) <= text.count(self.close, start, tag[0])
        )
        if tags:
            return next(whole, (fit or tags)[0])
        if (cut := self.frame_end.search(text, start)) is None:
            raise ValueError("an argument of the tool call does not end")
        return cut.start(), cut.start()

    def _is_last(self, text: str, at: int, further: Callable[[str], bool]) -> bool:
        found = self.after.match(text, at)
        return found is not None and (found[1] is None or further(found[1].strip()))


_XML_PAIR = _Pair(
    re.compile(r"\s*<parameter=([^>\n]+)>\n?"),
    "</parameter>",
    re.compile(
        r"\s*(?:<parameter=([^>\n]+)>|(?:</function>\s*)?(?:</tool_call>\s*)?(?:\Z|<tool_call>|<function=))"
    ),
    re.compile(r"\s*(?:</function>|</tool_call>)"),
    ("<function=", "<parameter="),
)
_GLM_PAIR = _Pair(
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    "</arg_value>",
    re.compile(r"\s*(?:<arg_key>(.*?)</arg_key>|(?:</tool_call>\s*)?(?:\Z|<tool_call>))", re.DOTALL),
    re.compile(r"\s*</tool_call>"),
    ("<tool_call>", "<arg_value>"),
)


def _xml_frame(name: re.Pattern[str], pair: _Pair, end_tag: str) -> Callable[..., Frame]:
    """Reads a name, then pairs of key and unquoted value."""

    def read(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
        found = name.match(text, start)
        if found is None and text[start:].lstrip().startswith("{"):
            repairs.append("json_call")
            return _read_objects(text, start, tools, repairs)
        if found is None:
            raise ValueError("the tool call does not name its function")
        spec, end = find_tool(found[1].strip(), tools), found.end()
        arguments: dict[str, object] = {}
        while one := pair.begin.match(text, end):
            key = one[1].strip()
            value, end = _xml_value(text, one.end(), pair, repairs, _further(spec, {*arguments, key}))
            arguments[key] = typed(value, key, spec)
        if end_tag:
            after = re.compile(rf"\s*{end_tag}").match(text, end)
            if after is None:
                repairs.append("closed_tag")
            else:
                end = after.end()
        return [ToolCall(name=found[1].strip(), arguments=arguments)], end

    return read


def _further(spec: ToolSpec | None, given: set[str]) -> Callable[[str], bool]:
    """Whether a name is that of an argument which may still come."""
    names = None if spec is None else spec.parameters.get("properties", {})
    return lambda name: name not in given and (names is None or name in names)


def _xml_value(
    text: str, start: int, pair: _Pair, repairs: list[str], further: Callable[[str], bool]
) -> tuple[str, int]:
    end, behind = pair.end(text, start, further)
    value = text[start:end]
    unclosed = None if pair is _GLM_PAIR or pair.close in value else _XML_NEXT.search(value)
    if unclosed is not None and not further(unclosed[1]):
        unclosed = None
    if unclosed:
        value, behind = value[: unclosed.start()], start + unclosed.start()
    if unclosed or behind == end:
        repairs.append("closed_tag")
    return value.removesuffix("\n") if pair is _XML_PAIR else value, behind


def _plain(value: object) -> str:
    if isinstance(value, str) and value.strip() == "null":
        raise ValueError("without quotes the text 'null' cannot be told from null")
    return value if isinstance(value, str) else _dumps(value)


def _xml_call(_: int, call: ToolCall) -> str:
    _refuse(call, "</parameter>", "<parameter=")
    pairs = (f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<function={call.name}>\n{''.join(pairs)}</function>"


def _glm_call(_: int, call: ToolCall) -> str:
    _refuse(call, "</arg_value>", "<arg_value>")
    pairs = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in call.arguments.items()
    )
    return f"{call.name}\n{''.join(pairs)}"


def _refuse(call: ToolCall, *tags: str) -> None:
    for value, tag in itertools.product(map(_plain, call.arguments.values()), tags):
        if tag in value:
            raise ValueError(f"an argument that holds {tag} cannot be written")


def _tag(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in texts))


_NAME = r"(?P<name>[^\s<\[{(]+)"
_read_named = _named_frame(_NAME, r"\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)")
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"


class _WithExamples(Native):
    """Ends the description of the tools with calls of some."""

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        described = super().describe(tools)
        if not tools:
            return described
        names = dict.fromkeys((example_call(tools).name, tools[0].name, tools[-1].name))
        shown = (self.render("", [example_call(tools, name)], tools) for name in names)
        return "\n".join([described, "", "Examples of calls:", *shown])


HERMES_JSON = Native(
    name="hermes-json",
    howto='<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
    tags=("<tool_call>\n", "\n</tool_call>"), starts=_tag("<tool_call>"), markers=("<tool_call>",),
    read=_json_frame("arguments"),
    write=_one_each(_object("arguments")),
)  # fmt: skip
HERMES = replace(HERMES_JSON, name="hermes")
"""of the profile hermes-1"""
KEEPS_TOOLS_JSON = re.compile(r"qwen[-_]?2\.5[-_]?coder", re.IGNORECASE)
"""names of the family that writes `<tools>` whatever its chat template asks for, and keeps to it where the
prompt shows examples"""
TOOLS_JSON = _WithExamples(
    name="tools-json",
    howto='<tools>{"name": "...", "arguments": {...}}</tools>',
    tags=("<tools>\n", "\n</tools>"), markers=("<tools>",),
    starts=re.compile(r'<tools>(?=\s*\{\s*"name")'), read=HERMES_JSON.read, write=HERMES_JSON.write,
)  # fmt: skip
"""the form that Qwen2.5-Coder keeps, whose own template asks for another (vllm-project/vllm#32926)"""
QWEN_CODER = replace(
    HERMES_JSON,
    name="qwen-coder",
    howto="<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>",
    read=_xml_frame(_XML_NAME, _XML_PAIR, "</function>"),
    write=_one_each(_xml_call),
    inline=re.compile(r"(?=<function=(?P<name>[^>\n]+)>)"),
    markers=("<tool_call>", "<function="),
)
GLM = replace(
    HERMES_JSON,
    name="glm",
    howto="<tool_call>NAME <arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>",
    tags=("<tool_call>", "</tool_call>"),
    read=_xml_frame(_GLM_NAME, _GLM_PAIR, ""),
    write=_one_each(_glm_call),
)
GLM_4 = Native(
    name="glm-4",
    howto="the function's name on a line, then its arguments as a JSON object",
    starts=re.compile(r"(?m)^(?=[A-Za-z_][\w.-]*\n\s*\{)"),
    read=_named_frame(_NAME, r"\n\s*(?=\{)"),
    write=_one_each(lambda _, call: f"{call.name}\n{_dumps(call.arguments)}"),
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
    read=_json_frame("parameters"),
    write=_one_each(_object("parameters")),
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
    write=_all_in_one(lambda calls: f"[{', '.join(map(python_call, calls))}]"),
)  # fmt: skip
GEMMA = Native(
    name="gemma",
    howto='```tool_code\nNAME(KEY="value")\n```',
    tags=("```tool_code\n", "\n```"), starts=_tag("```tool_code\n"),
    inline=re.compile(r"```(?:python|py)?[ \t]*\n(?=(?P<name>[A-Za-z_]\w*)\()"),
    read=_python_lines,
    write=_one_each(lambda _, call: python_call(call)),
    markers=("```tool_code\n",),
)  # fmt: skip
MISTRAL = Native(
    name="mistral",
    howto='[TOOL_CALLS] [{"name": "...", "arguments": {...}}]',
    tags=("[TOOL_CALLS]", ""), starts=_tag("[TOOL_CALLS]"), gaps=("", "\n"), markers=("[TOOL_CALLS]",),
    read=_mistral_frame,
    write=_all_in_one(lambda calls: " " + _list(calls)),
)  # fmt: skip
MISTRAL_ARGS = replace(
    MISTRAL,
    name="mistral-args",
    howto="[TOOL_CALLS]NAME[ARGS]{...}",
    gaps=("", ""),
    write=_one_each(lambda _, call: f"{call.name}[ARGS]{_dumps(call.arguments)}"),
)
PHI = replace(
    MISTRAL,
    name="phi",
    howto='<|tool_call|>[{"name": "...", "arguments": {...}}]<|/tool_call|>',
    tags=("<|tool_call|>", "<|/tool_call|>"), markers=("<|tool_call|>", "functools"), read=_read_objects,
    starts=re.compile(r"<\|tool_call\|>|functools(?=\s*\[)"),
    write=_all_in_one(_list),
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
    read=_named_frame(
        rf"(?:function{_DEEPSEEK_SEP})?(?P<name>[^\s<{{]+)", rf"(?:{_DEEPSEEK_SEP}|\s*```json\s*)+", r"\s*```"
    ),
    write=_one_each(lambda _, call: f"{call.name}{_DEEPSEEK_SEP}{_dumps(call.arguments)}"),
)  # fmt: skip
DEEPSEEK_3 = replace(
    DEEPSEEK,
    name="deepseek-3",
    howto=f"{_DEEPSEEK_BEGIN}function{_DEEPSEEK_SEP}NAME and the arguments in a ```json block",
    gaps=("", "\n"),
    write=_one_each(
        lambda _, call: f"function{_DEEPSEEK_SEP}{call.name}\n```json\n{_dumps(call.arguments)}\n```"
    ),
)
KIMI = Native(
    name="kimi",
    howto="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    tags=("<|tool_call_begin|>", "<|tool_call_end|>"), gaps=("", ""),
    starts=re.compile(r"(?:<\|tool_calls?_section_begin\|>\s*)?<\|tool_call_begin\|>"),
    markers=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    read=_named_frame(r"(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?", r"\s*<\|tool_call_argument_begin\|>"),
    write=_one_each(
        lambda n, call: f"functions.{call.name}:{n}<|tool_call_argument_begin|>{_dumps(call.arguments)}"
    ),
)  # fmt: skip
