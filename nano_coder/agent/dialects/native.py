"""How a family of open models marks, separates and writes its tool calls, and the dialects of Qwen.

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
    blocks,
    call_of,
    example_call,
    fenced,
    is_example,
    missed_call,
    read_json,
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
        return f"call{number:05d}"

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


def json_frame(key: str) -> Callable[[str, int, Sequence[ToolSpec], list[str]], Frame]:
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
read_objects = json_frame("arguments")


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def one_each(form: Callable[[int, ToolCall], str]) -> Callable[..., Iterator[str]]:
    def write(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> Iterator[str]:
        return (form(number, call) for number, call in enumerate(calls))

    return write


def call_object(key: str) -> Callable[[int, ToolCall], str]:
    return lambda _, call: dumps({"name": call.name, key: call.arguments})


_XML_NAME = re.compile(r"\s*<function=([^>\n]+)>")
_XML_NEXT = re.compile(r"\n?<parameter=([^>\n]+)>")


@dataclass(frozen=True, slots=True)
class Pair:
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
    next_key: re.Pattern[str] | None = None
    """a key at which a value ends that was not closed; such values end in a line break of the dialect's"""

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


_XML_PAIR = Pair(
    re.compile(r"\s*<parameter=([^>\n]+)>\n?"),
    "</parameter>",
    re.compile(
        r"\s*(?:<parameter=([^>\n]+)>|(?:</function>\s*)?(?:</tool_call>\s*)?(?:\Z|<tool_call>|<function=))"
    ),
    re.compile(r"\s*(?:</function>|</tool_call>)"),
    ("<function=", "<parameter="),
    _XML_NEXT,
)


def xml_frame(name: re.Pattern[str], pair: Pair, end_tag: str) -> Callable[..., Frame]:
    """Reads a name, then pairs of key and unquoted value."""

    def read(text: str, start: int, tools: Sequence[ToolSpec], repairs: list[str]) -> Frame:
        found = name.match(text, start)
        if found is None and text[start:].lstrip().startswith("{"):
            repairs.append("json_call")
            return read_objects(text, start, tools, repairs)
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
    text: str, start: int, pair: Pair, repairs: list[str], further: Callable[[str], bool]
) -> tuple[str, int]:
    end, behind = pair.end(text, start, further)
    value = text[start:end]
    unclosed = None if pair.next_key is None or pair.close in value else pair.next_key.search(value)
    if unclosed is not None and not further(unclosed[1]):
        unclosed = None
    if unclosed:
        value, behind = value[: unclosed.start()], start + unclosed.start()
    if unclosed or behind == end:
        repairs.append("closed_tag")
    return value.removesuffix("\n") if pair.next_key else value, behind


def plain(value: object) -> str:
    if isinstance(value, str) and value.strip() == "null":
        raise ValueError("without quotes the text 'null' cannot be told from null")
    return value if isinstance(value, str) else dumps(value)


def _xml_call(_: int, call: ToolCall) -> str:
    refuse(call, "</parameter>", "<parameter=")
    pairs = (f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<function={call.name}>\n{''.join(pairs)}</function>"


def refuse(call: ToolCall, *tags: str) -> None:
    for value, tag in itertools.product(map(plain, call.arguments.values()), tags):
        if tag in value:
            raise ValueError(f"an argument that holds {tag} cannot be written")


def tag(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in texts))


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
    tags=("<tool_call>\n", "\n</tool_call>"), starts=tag("<tool_call>"), markers=("<tool_call>",),
    read=json_frame("arguments"),
    write=one_each(call_object("arguments")),
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
    read=xml_frame(_XML_NAME, _XML_PAIR, "</function>"),
    write=one_each(_xml_call),
    inline=re.compile(r"(?=<function=(?P<name>[^>\n]+)>)"),
    markers=("<tool_call>", "<function="),
)
