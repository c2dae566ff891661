"""Calls as other parsers' tests know them: what each family writes, well and badly, whole and in any two parts.

The kinds of cases are those of the tool-parser tests of vLLM (`tests/tool_parsers`) and SGLang
(`test/registered/function_call`): several calls, all types, no arguments, text around, escapes, tags that are
missing, keys in another order, broken JSON. Texts, tools and expectations are written anew.
"""

# ruff: noqa: E501 (texts of one line)
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nano_coder.agent.dialects.dialect import DIALECTS, StreamParser
from nano_shared.types import ToolCall, ToolSpec

TYPES = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "share": {"type": "number"},
    "on": {"type": "boolean"},
    "nothing": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "items": {"type": "array"},
    "inner": {"type": "object"},
    "either": {"type": ["integer", "null"]},
}


def spec(name: str, properties: dict[str, Any]) -> ToolSpec:
    return ToolSpec(
        name=name, description="of a test", parameters={"type": "object", "properties": properties}
    )


TOOLS = (
    spec("tide", {"port": {"type": "string"}, "unit": {"type": "string"}}),
    spec("moor", {"ship": {"type": "string"}, "days": {"type": "integer"}}),
    spec("log", TYPES),
    spec("bell", {}),
)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


TIDE, MOOR, BELL = call("tide", port="Bremen"), call("moor", ship="Ruth", days=3), call("bell")
ALL = call(
    "log", text="a b", whole=42, share=3.25, on=True, nothing=None, items=["a", "b"], inner={"k": {"l": [1]}},
    either=7,
)  # fmt: skip
ESCAPED = call("log", text='He said "aye"\nC:\\Ships\\Ruth\tend ⚓ <b> {x} [y]')
J = json.dumps
Write = Callable[..., str]


def j(one: ToolCall, key: str = "arguments") -> str:
    return J({"name": one.name, key: one.arguments}, ensure_ascii=False)


def xml(one: ToolCall) -> str:
    pairs = "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in one.arguments.items())
    return f"<tool_call>\n<function={one.name}>\n{pairs}</function>\n</tool_call>"


def glm(one: ToolCall) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in one.arguments.items()
    )
    return f"<tool_call>{one.name}\n{pairs}</tool_call>"


def raw(value: Any) -> str:
    return value if isinstance(value, str) else J(value)


def py(one: ToolCall) -> str:
    return f"{one.name}({', '.join(f'{k}={v!r}' for k, v in one.arguments.items())})"


def deepseek_3(one: ToolCall) -> str:
    body = J(one.arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{one.name}\n```json\n{body}\n```<｜tool▁call▁end｜>"


def deepseek(one: ToolCall) -> str:
    body = J(one.arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>{one.name}<｜tool▁sep｜>{body}<｜tool▁call▁end｜>"


def section(one: Callable[[ToolCall], str]) -> Write:
    return lambda *calls: f"<｜tool▁calls▁begin｜>{''.join(map(one, calls))}<｜tool▁calls▁end｜>"


def kimi(*calls: ToolCall) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{c.name}:{n} <|tool_call_argument_begin|>"
        f"{J(c.arguments, ensure_ascii=False)} <|tool_call_end|>"
        for n, c in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(*calls: ToolCall) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>"
        f"{J(c.arguments, ensure_ascii=False)}"
        for c in calls
    )


WRITERS: dict[str, Write] = {
    "hermes-json": lambda *calls: "\n".join(f"<tool_call>\n{j(c)}\n</tool_call>" for c in calls),
    "qwen-coder": lambda *calls: "\n".join(map(xml, calls)),
    "glm": lambda *calls: "\n".join(map(glm, calls)),
    "glm-4": lambda *calls: "\n".join(f"{c.name}\n{J(c.arguments, ensure_ascii=False)}" for c in calls),
    "llama-3": lambda *calls: "; ".join(j(c, "parameters") for c in calls),
    "pythonic": lambda *calls: f"[{', '.join(map(py, calls))}]",
    "gemma": lambda *calls: "\n".join(f"```tool_code\n{py(c)}\n```" for c in calls),
    "mistral": lambda *calls: f"[TOOL_CALLS] [{', '.join(map(j, calls))}]",
    "mistral-args": lambda *calls: "".join(
        f"[TOOL_CALLS]{c.name}[ARGS]{J(c.arguments, ensure_ascii=False)}" for c in calls
    ),
    "phi": lambda *calls: f"<|tool_call|>[{', '.join(map(j, calls))}]<|/tool_call|>",
    "deepseek-3": section(deepseek_3),
    "deepseek": section(deepseek),
    "kimi": kimi,
    "harmony": harmony,
}
"""a dialect -> its calls, as the family's template writes them"""

Case = tuple[str, str, tuple[ToolCall, ...]]
"""dialect, text, calls"""
COMMON: list[Case] = [
    (name, text, calls)
    for name, write in WRITERS.items()
    for calls in ((TIDE,), (TIDE, MOOR), (TIDE, TIDE, BELL), (ALL,), (BELL,), (ESCAPED,))
    for text in (
        write(*calls),
        *([f"I look first.\n{write(*calls)}"] if name != "harmony" else [
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{write(*calls)}"
        ]),
    )
]  # fmt: skip
P = '{"port": "Bremen"}'
MORE: list[Case] = [
    ("hermes-json", f'<tool_call>{{"name": "tide", "arguments": {P}}}</tool_call>'
     '<tool_call>{"name": "bell", "arguments": {}}</tool_call>', (TIDE, BELL)),
    ("hermes-json", f'<tool_call>\n{{"name": "tide", "arguments": {P}}}', (TIDE,)),
    ("hermes-json", f'<tool_call>\n{{"name": "tide",\n\n"arguments":\n{P}}}\n</tool_call>', (TIDE,)),
    ("hermes-json", f'<tool_call>{{"arguments": {P}, "name": "tide"}}</tool_call>', (TIDE,)),
    ("hermes-json", '<tool_call>{"name": "tide", "arguments": "{\\"port\\": \\"Bremen\\"}"}</tool_call>', (TIDE,)),
    ("hermes-json", f'<tool_call>[{{"name": "tide", "arguments": {P}}}]</tool_call>', (TIDE,)),
    ("hermes-json", f'Now.<tool_call>{{"name": "tide", "arguments": {P}}}</tool_call> It comes.', (TIDE,)),
    ("hermes-json", f'<tool_call>\n```json\n{{"name": "tide", "arguments": {P}}}\n```\n</tool_call>', (TIDE,)),
    ("hermes-json", "<tool_call>\n{'name': 'tide', 'arguments': {'port': 'Bremen'}}\n</tool_call>", (TIDE,)),
    ("hermes-json", f'<tool_call>{{"name": "tide", "arguments": {P},}}</tool_call>', (TIDE,)),
    ("llama-3", f'Here it is: {{"name": "tide", "parameters": {P}}} Shall I go on?', (TIDE,)),
    ("llama-3", f'{{"name": "tide", "parameters": {P}}} I used {{tide}} here.', (TIDE,)),
    ("llama-3", f'{{"name": "tide", "parameters": {P}}} The arguments were {P}', (TIDE,)),
    ("llama-3", f'{{"name": "tide", "arguments": {P}}}', (TIDE,)),
    ("llama-3", f'<|python_tag|>{{"type": "function", "name": "tide", "parameters": {P}}}', (TIDE,)),
    *[("llama-3", f'{{"name": "tide", "parameters": {P}}}{by}{{"name": "bell", "parameters": {{}}}}', (TIDE, BELL))
      for by in ("; ", ";", " ; ", ";\n", "\n", " ")],
    ("llama-3", f'First: {{"name": "tide", "parameters": {P}}}; {{"name": "bell", "parameters": {{}}}} so.',
     (TIDE, BELL)),
    ("llama-3", '{"name": "log", "parameters": {"text": "a {b} [c]", "inner": {"in": "d {e}"}}}',
     (call("log", text="a {b} [c]", inner={"in": "d {e}"}),)),
    ("pythonic", "Here is a call: [tide(port='Bremen')]", (TIDE,)),
    ("pythonic", "[tide(port='Bremen')] and [moor(ship='Ruth', days=3)]", (TIDE, MOOR)),
    ("pythonic", "It is. <|python_start|>[tide(port='Bremen')]<|python_end|> So we see.", (TIDE,)),
    ("pythonic", "<|python_start|>[tide(port='Bremen'), bell()]", (TIDE, BELL)),
    ("pythonic", "[tide( port = 'Bremen' ) ,\n  bell( )\n]", (TIDE, BELL)),
    ("pythonic", r"[log(text='Ruth\'s \"bow\"', nothing=None, on=True, inner={}, items=[])]",
     (call("log", text='Ruth\'s "bow"', nothing=None, on=True, inner={}, items=[]),)),
    ("pythonic", "[log(inner={'o': [1, 2], 'n': {'k': 'v'}}, items=[[1], ['])']])]",
     (call("log", inner={"o": [1, 2], "n": {"k": "v"}}, items=[[1], ["])"]]),)),
    ("pythonic", "tide(port='Bremen')", (TIDE,)),
    ("mistral", f'[TOOL_CALLS][{{"arguments": {P}, "name": "tide"}}]', (TIDE,)),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"text": "x", "inner": {"name": "moor"}}, "name": "log"}]',
     (call("log", text="x", inner={"name": "moor"}),)),
    ("mistral", f'[TOOL_CALLS]  [ {{"name":"tide" , "arguments" : {P} }} ]\nand more', (TIDE,)),
    ("mistral", f'[TOOL_CALLS] [{{"name": "tide", "arguments": {P}}}][TOOL_CALLS] [{{"name": "bell", "arguments": {{}}}}]',
     (TIDE, BELL)),
    ("mistral", f'[TOOL_CALLS] so [{{"name": "tide", "arguments": {P}}}]', (TIDE,)),
    ("mistral", f'[TOOL_CALLS]{{"name": "tide", "arguments": {P}}}', (TIDE,)),
    ("mistral", f'[{{"name": "tide", "arguments": {P}}}]', (TIDE,)),
    *[(name, f"hi{{hi[TOOL_CALLS]tide{P}[TOOL_CALLS]bell{{}}", (TIDE, BELL)) for name in ("mistral", "mistral-args")],
    ("mistral-args", f"[TOOL_CALLS]tide[CALL_ID]a1b2c3d4e[ARGS]{P}", (TIDE,)),
    ("mistral-args", f"[TOOL_CALLS] tide [ARGS] {P}", (TIDE,)),
    ("mistral-args", f'[TOOL_CALLS] [{{"name": "tide", "arguments": {P}}}]', (TIDE,)),
    ("kimi", f"<|tool_calls_section_begin|><|tool_call_begin|>tide:0<|tool_call_argument_begin|>{P}"
     "<|tool_call_end|><|tool_calls_section_end|>", (TIDE,)),
    ("kimi", f"So.<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.tide:0\n<|tool_call_argument_begin|>\n"
     f"{P}\n<|tool_call_end|>\n<|tool_calls_section_end|>", (TIDE,)),
    ("kimi", f"<|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>{P}<|tool_call_end|>", (TIDE,)),
    ("kimi", f"<|tool_call_section_begin|><|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>{P}"
     "<|tool_call_end|><|tool_call_section_end|>", (TIDE,)),
    ("kimi", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>{P}", (TIDE,)),
    ("qwen-coder", "<function=tide>\n<parameter=port>\nBremen\n</parameter>\n</function>", (TIDE,)),
    ("qwen-coder", "<tool_call><function=tide><parameter=port>Bremen</parameter></function></tool_call>", (TIDE,)),
    ("qwen-coder", "Now:\n<tool_call>\n<function=tide>\n<parameter=port>\nBremen\n<parameter=unit>\nm\n</parameter>\n"
     "</function>\n</tool_call>", (call("tide", port="Bremen", unit="m"),)),
    ("qwen-coder", "<tool_call>\n<function=tide>\n<parameter=port>\nBremen\n</function>\n</tool_call>", (TIDE,)),
    ("qwen-coder", "<tool_call>\n<function=tide>\n<parameter=port>\nBremen\n</parameter>\n</tool_call>", (TIDE,)),
    ("qwen-coder", "<function=tide>\n<parameter=port>\nBremen\n</parameter>\n</function>\n</tool_call>", (TIDE,)),
    ("qwen-coder", '<tool_call>\n<function=log>\n<parameter=inner>\n{"a": 1,\n "b": 2}\n</parameter>\n</function>\n</tool_call>',
     (call("log", inner={"a": 1, "b": 2}),)),
    ("qwen-coder", "<tool_call>\n<function=log>\n<parameter=on>\nTrue\n</parameter>\n<parameter=nothing>\nNone\n"
     "</parameter>\n</function>\n</tool_call>", (call("log", on=True, nothing="None"),)),
    ("qwen-coder", "<tool_call>\n<function=log>\n<parameter=text>\nif a:\n    b <c> d\n\n</parameter>\n</function>\n</tool_call>",
     (call("log", text="if a:\n    b <c> d\n"),)),
    ("qwen-coder", f'<tool_call>\n{{"name": "tide", "arguments": {P}}}\n</tool_call>', (TIDE,)),
    ("glm", "<tool_call>tide\n    <arg_key>port</arg_key>\n    <arg_value>Bremen</arg_value>\n    </tool_call>", (TIDE,)),
    ("glm", "<tool_call>tide<arg_key>port</arg_key><arg_value>Bremen</arg_value></tool_call>", (TIDE,)),
    ("glm", "<tool_call>bell\n</tool_call>", (BELL,)),
    ("glm", "<tool_call>bell</tool_call>", (BELL,)),
    ("glm", "<tool_call>tide\n<arg_key>port</arg_key>\n<arg_value>Bremen</arg_value>", (TIDE,)),
    ("glm", "One.\n\n<tool_call>tide\n<arg_key>port</arg_key>\n<arg_value>Bremen</arg_value>\n</tool_call>\n\nTwo.\n\n"
     "<tool_call>bell\n</tool_call>", (TIDE, BELL)),
    ("glm", "<think>Hm.</think>\n\nNow.\n<tool_call>tide\n<arg_key>port</arg_key>\n<arg_value>Bremen</arg_value>\n"
     "</tool_call>", (TIDE,)),
    ("glm-4", f"tide\n{P}\n", (TIDE,)),
    ("glm-4", f"\ntide\n{P}", (TIDE,)),
    ("phi", f'functools[{{"name": "tide", "arguments": {P}}}]', (TIDE,)),
    ("phi", f'So.\nfunctools[\n  {{"name": "tide", "arguments": {P}}},\n  {{"name": "bell", "arguments": {{}}}}\n]\nSo?',
     (TIDE, BELL)),
    ("phi", f'<|tool_call|>{{"name": "tide", "arguments": {P}}}<|/tool_call|>', (TIDE,)),
    ("deepseek-3", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\n```json\n{P}\n```<｜tool▁call▁end｜>", (TIDE,)),
    ("deepseek-3", f"<｜tool▁calls▁begin｜>function<｜tool▁sep｜>tide\n```json\n{P}\n```<｜tool▁calls▁end｜>", (TIDE,)),
    ("deepseek-3", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\n```json\n{P}\n```", (TIDE,)),
    ("deepseek", f"<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>tide<｜tool▁sep｜>{P}<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>bell<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>", (TIDE, BELL)),
    ("gemma", "```tool_code\nprint(tide(port='Bremen'))\n```", (TIDE,)),
    ("gemma", "```tool_code\ntide(port='Bremen')\nbell()\n```", (TIDE, BELL)),
    ("gemma", "```python\ntide(port='Bremen')\n```", (TIDE,)),
    ("harmony", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{harmony(TIDE)}<|call|>", (TIDE,)),
    ("harmony", f"<|channel|>commentary to=functions.tide<|message|>{P}<|call|>", (TIDE,)),
    ("harmony", f"<|channel|>commentary to=tide <|constrain|>json<|message|>{P}", (TIDE,)),
    ("harmony", f"<|channel|>analysis to=functions.tide code<|message|>{P}", (TIDE,)),
    ("harmony", "<|channel|>commentary to=functions.bell <|constrain|>json<|message|>", (BELL,)),
    ("harmony", f"<|start|>assistant to=functions.tide<|channel|>commentary json<|message|>{P}<|call|>", (TIDE,)),
    ("harmony", f"{harmony(TIDE)}<|call|><|start|>assistant<|channel|>final<|message|>That is it.", (TIDE,)),
    ("harmony", '<|channel|>commentary to=functions.tide <|constrain|>json<|message|>{\n"port": "Bremen"\n}', (TIDE,)),
]  # fmt: skip
BROKEN = [
    ("hermes-json", f'<tool_call>{{"name": "tide", "arguments": {P}</tool_call>'),
    ("hermes-json", '<tool_call>{"name": "tide", "arguments": {"port": "Br'),
    ("hermes-json", "<tool_call>tide please</tool_call>"),
    ("hermes-json", '<tool_call>{"arguments": {"port": "x"}}</tool_call>'),
    ("llama-3", '{"name": "tide", "parameters": {broken}'),
    ("llama-3", '{"parameters": {}}'),
    ("pythonic", "[tide(port=b'z'), bell()]"),
    ("pythonic", "[log(share=1e999)]"),
    ("pythonic", "[tide(x='a 'b')]"),
    ("mistral", "[TOOL_CALLS] not JSON at all"),
    ("mistral-args", "[TOOL_CALLS]tide"),
    ("phi", '<|tool_call|>[{"name": "tide", "arguments": {'),
    ("phi", "functools[ this is text ]"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>{\"port\""),
    ("qwen-coder", "<tool_call>\n<function>\n</tool_call>"),
    ("glm", "<tool_call></tool_call>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide<｜tool▁sep｜>{\"port\": <｜tool▁call▁end｜>"),
    ("harmony", "<|channel|>commentary to=functions.tide <|constrain|>json<|message|>foo"),
    ("gemma", "```tool_code\ntide(\n```"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), [*COMMON, *MORE])
def test_every_call_is_read_however_the_text_was_cut(
    name: str, text: str, calls: tuple[ToolCall, ...]
) -> None:
    dialect = DIALECTS[name]
    whole = dialect.parse(text, TOOLS)
    assert (whole.error, whole.calls) == (None, calls)
    for at in range(len(text) + 1):
        parser = StreamParser(dialect, TOOLS)
        shown = [parser.feed(text[:at]), parser.feed(text[at:])]
        parsed, rest = parser.finish()
        assert parsed == whole, at
        pieces = [*shown, rest]
        told = "".join(p.reasoning for p in pieces), "".join(p.thought for p in pieces)
        assert told == (whole.reasoning, whole.thought), at


@pytest.mark.parametrize(("name", "text", "calls"), [case for case in COMMON if len(case[2]) < 3])
def test_what_a_family_writes_needs_no_repair(name: str, text: str, calls: tuple[ToolCall, ...]) -> None:
    assert DIALECTS[name].parse(text, TOOLS).repairs == ()


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_call_is_an_error_that_says_how_to_write_it(name: str, text: str) -> None:
    parsed = DIALECTS[name].parse(text, TOOLS)
    assert parsed.calls == ()
    assert not parsed.prose
    assert parsed.error
    assert parsed.error.count("write ") == 1


@pytest.mark.parametrize("name", WRITERS)
def test_prose_is_no_call(name: str) -> None:
    for text in ("How can I help? [1] shows {this}, and (that).", "A list: [a, b]\n{x}\n", "f(x) = 2; g(y)"):
        said = f"<|channel|>final<|message|>{text}" if name == "harmony" else text
        parsed = DIALECTS[name].parse(said, TOOLS)
        assert (parsed.calls, parsed.thought, parsed.prose) == ((), text, True)
