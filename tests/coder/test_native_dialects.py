"""The dialects of open families: parse and render are inverses, repairs are named, streams read as wholes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.agent.dialects.dialect import DIALECTS, StreamParser
from nano_coder.agent.dialects.native import Native
from nano_coder.tools.tool import TOOLS
from nano_shared.types import ToolCall

SPECS = tuple(tool.spec for tool in TOOLS.values())
NAMES = [name for name in DIALECTS if isinstance(DIALECTS[name], Native)]
SHELL = ToolCall(name="shell", arguments={"command": "ls -la"})
READ = ToolCall(name="read_file", arguments={"path": "a b.py", "start": 3})

LS = '{"command": "ls -la"}'
ASK = f'{{"name": "shell", "arguments": {LS}}}'

WRITTEN: list[tuple[str, str, str, tuple[ToolCall, ...]]] = [
    ("hermes-json", '<tool_call>\n' + ASK + '\n</tool_call>', "", (SHELL,)),
    ("hermes-json", 'Look.\n<tool_call>' + ASK + '</tool_call>\n'
     '<tool_call>{"name": "read_file", "arguments": {"path": "a b.py", "start": 3}}</tool_call>',
     "Look.", (SHELL, READ)),
    ("qwen-coder", "<tool_call>\n<function=read_file>\n<parameter=path>\na b.py\n</parameter>\n"
     "<parameter=start>\n3\n</parameter>\n</function>\n</tool_call>", "", (READ,)),
    ("glm", "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>a b.py</arg_value>\n"
     "<arg_key>start</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "", (READ,)),
    ("glm-4", 'shell\n' + LS, "", (SHELL,)),
    ("llama-3", '{"name": "shell", "parameters": ' + LS + '}', "", (SHELL,)),
    ("llama-3", '<|python_tag|>{"name": "shell", "parameters": ' + LS + '}; '
     '{"name": "read_file", "parameters": {"path": "a b.py", "start": 3}}', "", (SHELL, READ)),
    ("pythonic", '[shell(command="ls -la"), read_file(path=\'a b.py\', start=3)]', "", (SHELL, READ)),
    ("pythonic", '<|tool_call_start|>[shell(command="ls -la")]<|tool_call_end|>', "", (SHELL,)),
    ("gemma", 'Look.\n```tool_code\nshell(command="ls -la")\n```', "Look.", (SHELL,)),
    ("mistral", '[TOOL_CALLS] [' + ASK + ']', "", (SHELL,)),
    ("mistral", 'Look.[TOOL_CALLS][{"name": "shell", "arguments": ' + LS + ', "id": "123456789"}]',
     "Look.", (SHELL,)),
    ("mistral-args", '[TOOL_CALLS]shell[ARGS]' + LS + '[TOOL_CALLS]read_file[CALL_ID]abc[ARGS]'
     '{"path": "a b.py", "start": 3}', "", (SHELL, READ)),
    ("phi", '<|tool_call|>[' + ASK + ']<|/tool_call|>', "", (SHELL,)),
    ("deepseek-3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>shell\n```json\n" +
     LS + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", (SHELL,)),
    ("deepseek", "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>shell<｜tool▁sep｜>" +
     LS + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "Look.", (SHELL,)),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>" +
     LS + '<|tool_call_end|><|tool_calls_section_end|>', "", (SHELL,)),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
     ' to=functions.shell <|constrain|>json<|message|>' + LS, "", (SHELL,)),
    ("harmony", ' to=functions.shell<|channel|>commentary json<|message|>' + LS + '<|call|>', "", (SHELL,)),
]  # fmt: skip

REPAIRED: list[tuple[str, str, tuple[ToolCall, ...], tuple[str, ...]]] = [
    ("hermes-json", '<tool_call>{"name": "shell", "arguments": "{\\"command\\": \\"ls -la\\"}"}</tool_call>',
     (SHELL,), ("arguments_as_string",)),
    ("hermes-json", '<tool_call>{"name": "shell", "parameters": ' + LS + '}</tool_call>',
     (SHELL,), ("parameters_for_arguments",)),
    ("llama-3", ASK, (SHELL,), ("arguments_for_parameters",)),
    ("hermes-json", '<tool_call>{"name": "shell", "arguments": ' + LS + ', "why": "x"}</tool_call>',
     (SHELL,), ("extra_keys",)),
    ("hermes-json", '<tool_call>{"name": "shell", "arguments": {"command": "a\nb"}}</tool_call>',
     (ToolCall(name="shell", arguments={"command": "a\nb"}),), ("raw_control_characters",)),
    ("hermes-json", 'So:\n```json\n' + ASK + '\n```',
     (SHELL,), ("fenced_block",)),
    ("hermes-json", ASK, (SHELL,), ("missing_tags",)),
    ("hermes-json", '<tool_call>' + ASK, (SHELL,), ("closed_tag",)),
    ("hermes-json", '<tool_call>{"function": ' + ASK + '}</tool_call>',
     (SHELL,), ("function_wrapper",)),
    ("hermes-json", '<tool_call>' + ASK + '</tool_call> Done!',
     (SHELL,), ("text_after_call",)),
    ("gemma", "```tool_code\nprint(shell('ls -la'))\n```", (SHELL,), ("print", "positional_arguments")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "thought", "calls"), WRITTEN)
def test_what_a_family_writes_is_read_without_repair(
    name: str, text: str, thought: str, calls: tuple[ToolCall, ...]
) -> None:
    parsed = DIALECTS[name].parse(text, SPECS)
    assert (parsed.error, parsed.thought, parsed.calls, parsed.repairs) == (None, thought, calls, ())


@pytest.mark.parametrize(("name", "text", "calls", "repairs"), REPAIRED)
def test_each_repair_is_named(
    name: str, text: str, calls: tuple[ToolCall, ...], repairs: tuple[str, ...]
) -> None:
    parsed = DIALECTS[name].parse(text, SPECS)
    assert (parsed.error, parsed.calls, parsed.repairs) == (None, calls, repairs)


letters = st.text(st.characters(exclude_categories=["Cs"]))
TAGS = ("<tool_call>", "</tool_call>", "<function=shell>", "</function>", "<parameter=old>", "</parameter>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\n")  # fmt: skip
plain = letters | st.lists(st.sampled_from(TAGS) | letters, max_size=6).map("".join)
values: Any = st.one_of(st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2))
calls = st.one_of(
    st.builds(lambda command: ToolCall(name="shell", arguments={"command": command}), plain),
    st.builds(lambda path, n: ToolCall(name="read_file", arguments={"path": path, "start": n}),
              plain, st.integers()),
    st.builds(
        lambda path, old, new: ToolCall(name="edit_file", arguments={"path": path, "old": old, "new": new}),
        plain, plain, plain,
    ),
    st.builds(lambda x: ToolCall(name="no_such_tool", arguments={"x": x}), values),
    st.just(ToolCall(name="submit")),
)  # fmt: skip
thoughts = plain.filter(lambda t: not any(c in t for c in '<[{`"') and not t.endswith(("\n", "\r")))


@pytest.mark.parametrize("name", [*NAMES, "harmony"])
@settings(max_examples=300, deadline=None)
@given(thought=thoughts, several=st.lists(calls, min_size=1, max_size=3))
def test_a_dialect_parses_what_it_renders(name: str, thought: str, several: list[ToolCall]) -> None:
    dialect = DIALECTS[name]
    try:
        text = dialect.render(thought, several, SPECS)
    except ValueError:  # an argument that holds the closing tag of unquoted values
        return
    parsed = dialect.parse(text, SPECS)
    assert (parsed.error, list(parsed.calls), parsed.repairs) == (None, several, ())
    assert parsed.thought == thought


EXAMPLE = "<tool_call>\n<function=shell>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "value",
    ["a </function> b", "a </parameter> b", "a</parameter>\n</function>\n</tool_call>\nb", f"a {EXAMPLE} b",
     EXAMPLE,
     f"{EXAMPLE}\n{EXAMPLE}\n", "</parameter>\n<parameter=path>\nx", "a</tool_call>", "<function=shell>",
     "<parameter=command>x"],
)  # fmt: skip
@pytest.mark.parametrize("then", ["", "\nDone.", "\nThen:\n" + EXAMPLE])
def test_a_value_may_hold_what_calls_are_made_of(value: str, then: str) -> None:
    text = f"<tool_call>\n<function=edit_file>\n<parameter=path>\na\n</parameter>\n<parameter=new>\n{value}\n"
    text += f"</parameter>\n</function>\n</tool_call>{then}"
    first, *others = DIALECTS["qwen-coder"].parse(text, SPECS).calls
    assert first.arguments == {"path": "a", "new": value}
    assert len(others) == then.count("<tool_call>")


CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -la"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "thought", "called"),
    [
        ("hermes-json", f"<think>\nI could write {CALL}\n</think>\n\nNow.\n{CALL}",
         f"I could write {CALL}", "Now.", 1),
        ("hermes-json", f"I could write <tool_call>.\n</think>\n\n{CALL}",
         "I could write <tool_call>.", "", 1),
        ("hermes-json", f"<think>\nnever closed {CALL}", f"never closed {CALL}", "", 0),
        ("hermes-json", CALL.replace("ls -la", "grep </think> a"), "", "", 1),
        ("mistral", "[THINK]Hm.[/THINK]Done.", "Hm.", "Done.", 0),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|>"
         "<|start|>assistant<|channel|>final<|message|>Done.", "Hm.", "Done.", 0),
    ],
)  # fmt: skip
def test_reasoning_is_no_answer(name: str, text: str, reasoning: str, thought: str, called: int) -> None:
    parsed = DIALECTS[name].parse(text, SPECS)
    assert (parsed.reasoning, parsed.thought, len(parsed.calls)) == (reasoning, thought, called)
    assert parsed.prose == (called == 0 and bool(thought))


def test_prose_is_told_from_a_broken_call() -> None:
    assert DIALECTS["hermes-json"].parse("All done.", SPECS).prose
    broken = DIALECTS["hermes-json"].parse('<tool_call>{"name": "shell", "arg</tool_call>', SPECS)
    assert not broken.prose
    assert broken.error is not None
    assert "not JSON" in broken.error


def streamed(dialect: Any, parts: list[str]) -> tuple[str, str, Any]:
    """What a stream shows, and its parse."""
    parser = StreamParser(dialect, SPECS)
    shown = [parser.feed(part) for part in parts]
    parsed, rest = parser.finish()
    pieces = [*shown, rest]
    return "".join(p.reasoning for p in pieces), "".join(p.thought for p in pieces), parsed


@pytest.mark.parametrize("name", sorted({name for name, *_ in WRITTEN}))
def test_every_split_of_a_stream_reads_as_the_whole(name: str) -> None:
    texts = [text for n, text, *_ in (*WRITTEN, *REPAIRED) if n == name]
    texts += [f"<think>\nHm.\n</think>\n\n{texts[0]}", "All done.", "a < b\n\nthen [x] {y}\n"]
    dialect = DIALECTS[name]
    for text in texts:
        whole = dialect.parse(text, SPECS)
        for at in range(len(text) + 1):
            parts = [text[:at], text[at:]]
            assert streamed(dialect, parts) == (whole.reasoning, whole.thought, whole), (text, at)


@settings(max_examples=500, deadline=None)
@given(
    name=st.sampled_from([*NAMES, "harmony"]),
    thought=thoughts,
    several=st.lists(calls, max_size=2),
    reasoned=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_cutting_of_a_stream_reads_as_the_whole(
    name: str, thought: str, several: list[ToolCall], reasoned: bool, cuts: list[int]
) -> None:
    try:
        text = DIALECTS[name].render(thought, several, SPECS)
    except ValueError:
        return
    text = f"<think>\nWell.\n</think>\n\n{text}" if reasoned and name != "harmony" else text
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(places)]
    whole = DIALECTS[name].parse(text, SPECS)
    assert streamed(DIALECTS[name], parts) == (whole.reasoning, whole.thought, whole)


def test_a_stream_shows_what_is_settled_at_once() -> None:
    parser = StreamParser(DIALECTS["hermes-json"], SPECS)
    parser.feed("<think>Well.</think>")
    shown = [parser.feed(piece).thought for piece in ("Let me ", "look.\n", "<tool_", "call>{")]
    assert shown == ["Let me ", "look.", "", ""]
