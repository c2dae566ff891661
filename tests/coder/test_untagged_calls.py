"""Calls without a dialect's tags: those that are beyond doubt are read, and nothing else is."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nano_coder.agent.dialects.dialect import DIALECTS, Parsed, StreamParser, function_schema
from nano_coder.tools.tool import TOOLS
from nano_shared.types import ToolCall

NAMES = ("read_file", "edit_file", "write_file", "search", "shell", "calculate", "submit")
SPECS = tuple(TOOLS.find(name).spec for name in NAMES)
READERS = ("api", "hermes-json", "hermes", "qwen-coder", "mistral", "llama-3")
LS = ToolCall(name="shell", arguments={"command": "ls"})
READ = ToolCall(name="read_file", arguments={"path": "stats.py"})


def read(dialect: str, text: str) -> Parsed:
    return DIALECTS[dialect].parse(text, SPECS)


def written(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments})


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
calls = st.one_of(
    st.builds(lambda text: ToolCall(name="shell", arguments={"command": text}), words),
    st.builds(
        lambda path, n: ToolCall(name="read_file", arguments={"path": path, "start": n}), words, st.integers()
    ),
    st.builds(
        lambda path, text: ToolCall(name="write_file", arguments={"path": path, "content": text}),
        words,
        words,
    ),
    st.builds(lambda text: ToolCall(name="submit", arguments={"answer": text}), words),
)
LEADS = ("", "I run the tests first.\n", "Let me look at the file:\n\n", "So (a < b) holds, and `x` is {}.\n")
FORMS: dict[str, Any] = {
    "json": lambda text: f"```json\n{text}\n```",
    "tool_call": lambda text: f"```tool_call\n{text}\n```",
    "fence": lambda text: f"```\n{text}\n```\n",
    "tagged fence": lambda text: f"```xml\n<tools>\n{text}\n</tools>\n```",
    "tools": lambda text: f"<tools>\n{text}\n</tools>",
    "tool_calls": lambda text: f"<tool_calls>{text}</tool_calls>",
    "bare": lambda text: text,
}


@settings(max_examples=300, deadline=None)
@given(
    dialect=st.sampled_from(READERS[:4]),
    lead=st.sampled_from(LEADS),
    form=st.sampled_from(sorted(FORMS)),
    several=st.lists(calls, min_size=1, max_size=3, unique_by=str),
    key=st.sampled_from(("arguments", "parameters", "args")),
    shape=st.sampled_from(("lines", "list", "blocks")),
)
@example(
    dialect="api",
    lead="",
    form="fence",
    several=[ToolCall(name="shell", arguments={"command": "EXAMPLE"}), LS],
    key="arguments",
    shape="blocks",
)
def test_a_call_is_read_in_any_form(
    dialect: str, lead: str, form: str, several: list[ToolCall], key: str, shape: str
) -> None:
    each = [written(call, key) for call in several]
    match shape:
        case "lines":
            text = FORMS[form]("\n".join(each))
        case "list":
            text = FORMS[form](f"[{', '.join(each)}]")
        case _:
            text = "\n".join(FORMS[form](one) for one in each)
    parsed = read(dialect, lead + text)
    assert (parsed.error, list(parsed.calls)) == (None, several)
    assert parsed.repairs


@pytest.mark.parametrize(
    ("text", "call", "repair"),
    [
        ("```json\n{'name': 'shell', 'arguments': {'command': 'ls',},}\n```", LS, "python_literal"),
        ('```json\n{"name": "shell", "arguments": {"command": "ls"}\n```', LS, "closed_brackets"),
        ('```json\n{"name": "shell", "arguments": "{\\"command\\": \\"ls\\"}"}\n```', LS,
         "arguments_as_string"),
        ('{"type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}', LS,
         "function_wrapper"),
        ('{"tool_calls": [{"name": "shell", "arguments": {"command": "ls"}}]}', LS, "missing_tags"),
        ('{"tool": "shell", "args": {"command": "ls"}}', LS, "args_for_arguments"),
        ('```json\n{"name": "read_file", "path": "stats.py"}\n```', READ, "flat_arguments"),
        ('I look: {"name": "shell", "arguments": {"command": "ls"}}', LS, "inline_call"),
        ('```json\n{"name": "submit", "arguments": {"answer": 8}}\n```',
         ToolCall(name="submit", arguments={"answer": "8"}), "number_for_text"),
        ("\n".join([f"```json\n{written(LS)}\n```"] * 3), LS, "repeated_call"),
        (f"```json\n{written(LS)}\n```\nThis lists the files.", LS, "text_after_call"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dialect", ["api", "hermes-json"])
def test_each_liberty_is_named(dialect: str, text: str, call: ToolCall, repair: str) -> None:
    parsed = read(dialect, text)
    assert (parsed.error, parsed.calls) == (None, (call,))
    assert repair in parsed.repairs


RECORDED = [
    ('```json\n{\n  "name": "calculate",\n  "arguments": {\n    "expression": "5 + 3"\n  }\n}\n```',
     {"expression": "5 + 3"}),
    ('<tools>{"name": "calculate", "arguments": {"expression": "5 + 3"}}</tools>', {"expression": "5 + 3"}),
    ('```json\n{\n  "name": "submit",\n  "arguments": {\n    "answer": "The 10th number is 55."\n  }\n}\n```',
     {"answer": "The 10th number is 55."}),
]  # fmt: skip
"""answers of Qwen2.5-Coder-1.5B-Instruct, greedy: by llama.cpp under api-1, in bfloat16 under tools-json"""


@pytest.mark.parametrize(("text", "arguments"), RECORDED)
@pytest.mark.parametrize("dialect", ["api", "hermes-json", "tools-json"])
def test_a_real_models_answers_are_read(dialect: str, text: str, arguments: dict[str, Any]) -> None:
    assert [call.arguments for call in read(dialect, text).calls] == [arguments]


LISTED = "\n".join(json.dumps(function_schema(spec)) for spec in SPECS)
NO_CALLS = {
    "a package": 'It should read:\n\n```json\n{"name": "my-package", "version": "1.0", "scripts": {}}\n```',
    "a package named like a tool": '```json\n{"name": "search", "version": "1.0"}\n```',
    "a missing argument": '```json\n{"name": "read_file", "arguments": {"start": 1}}\n```',
    "a wrong type": '```json\n{"name": "read_file", "arguments": {"path": ["a", "b"]}}\n```',
    "other arguments": '```json\n{"name": "submit", "arguments": {"type": "object", "properties": {}}}\n```',
    "another tool": '```json\n{"name": "send_mail", "arguments": {"to": "me"}}\n```',
    "the tools": f"<tools>\n{LISTED}\n</tools>",
    "the tools as a list": f"```json\n{json.dumps([function_schema(spec) for spec in SPECS])}\n```",
    "a call inside a document": f'```json\n{{"log": [{written(LS)}]}}\n```',
    "a call inside code": f"```python\ncalls = []\ncalls.append({written(LS)})\n```",
    "a call and more": f"```json\n{written(LS)}\n// which lists the files\n```",
    "an example": f"For example, this lists the files:\n```json\n{written(LS)}\n```",
    "what not to do": f"I should never write\n```json\n{written(LS)}\n```\n",
    "cut": '```json\n{"name": "shell", "arguments": {"command": "rm -rf bui',
    "reasoning": f"<think>\n```json\n{written(LS)}\n```\n</think>\n\nThere is nothing to do.",
}


@pytest.mark.parametrize("case", NO_CALLS)
@pytest.mark.parametrize("dialect", ["api", "hermes-json"])
def test_what_is_no_call_is_not_executed(dialect: str, case: str) -> None:
    assert read(dialect, NO_CALLS[case]).calls == ()


@pytest.mark.parametrize("case", ["a package", "a package named like a tool", "the tools", "an example"])
def test_a_dialect_whose_calls_are_bare_objects_reads_no_other_objects(case: str) -> None:
    assert read("llama-3", NO_CALLS[case]).calls == ()


@settings(max_examples=200, deadline=None)
@given(
    dialect=st.sampled_from(READERS),
    lead=st.sampled_from(("A call looks like ", "For example:\n", "Instead of\n\n", "The syntax is:\n")),
    shown=calls,
    meant=calls,
    shown_as=st.sampled_from(("json", "fence")),
    meant_as=st.sampled_from(("tool_call tag", "tools", "json", "bare")),
)
@example(
    dialect="llama-3",
    lead="A call looks like ",
    shown=LS,
    meant=READ,
    shown_as="json",
    meant_as="tool_call tag",
)
def test_of_an_example_and_a_call_only_the_call_is_made(
    dialect: str, lead: str, shown: ToolCall, meant: ToolCall, shown_as: str, meant_as: str
) -> None:
    form = FORMS.get(meant_as, lambda text: f"<tool_call>\n{text}\n</tool_call>")
    text = f"{lead}{FORMS[shown_as](written(shown))} but first I look.\n{form(written(meant))}"
    parsed = read(dialect, text)
    assert (parsed.error, parsed.calls) == (None, (meant,))


@pytest.mark.parametrize(
    ("text", "told", "shown"),
    [
        (NO_CALLS["a missing argument"], "read_file: path is missing", '"name": "read_file"'),
        (NO_CALLS["another tool"], "unknown tool send_mail; the tools are read_file, edit_file", '"ls"'),
        (NO_CALLS["an example"], "shown as an example", '"name": "shell"'),
        (NO_CALLS["cut"], "no whole JSON object", '"name": "shell"'),
        ("```bash\npython -m pytest -q\n```", "no call", '"command": "python -m pytest -q"'),
        ("I run the tests.\n\n```sh\nmake test\n```\n", "no call", '"command": "make test"'),
        ('read_file(path="stats.py")', "no whole JSON object", '"name": "read_file"'),
        (NO_CALLS["the tools"], "describes a tool", '"name": "shell"'),
    ],
)
@pytest.mark.parametrize("dialect", ["api", "hermes-json"])
def test_what_looks_like_a_call_is_no_answer_and_the_reminder_shows_a_whole_one(
    dialect: str, text: str, told: str, shown: str
) -> None:
    parsed = read(dialect, text)
    assert not parsed.prose
    assert told in str(parsed.error)
    assert shown in str(parsed.error)
    again = read(dialect, str(parsed.error).partition(":\n" if dialect != "api" else "write\n")[2])
    assert again.calls, "the reminder's own call is one"


@pytest.mark.parametrize(
    "text",
    [
        "All done.",
        NO_CALLS["a package"],
        "Use `read_file` for that.",
        NO_CALLS["reasoning"],
        "- search(pattern) is faster now, and the parser reads `<tools>` again.",
        f"{'The fix is in place, and all tests pass. ' * 5}\nTo see it:\n```bash\nmake test\n```",
    ],
)
def test_prose_and_json_of_the_task_are_an_answer(text: str) -> None:
    assert read("api", text).prose
    assert read("api", f"{text} Even <tool_call>.").prose
    assert read("hermes-json", text).prose


@settings(max_examples=200, deadline=None)
@given(
    lead=st.sampled_from((*LEADS, "A call looks like ", "<think>\nHm.\n</think>\n\n")),
    form=st.sampled_from(sorted(FORMS)),
    call=calls,
    content=st.sampled_from(("", NO_CALLS["a package"] + "\n", "```python\nx = {'a': 1}\n```\n")),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_a_stream_never_shows_what_becomes_a_call(
    lead: str, form: str, call: ToolCall, content: str, cuts: list[int]
) -> None:
    dialect = DIALECTS["hermes-json"]
    text = lead + content + FORMS[form](written(call))
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser = StreamParser(dialect, SPECS)
    shown = [parser.feed(text[a:b]).thought for a, b in pairwise(places)]
    parsed, rest = parser.finish()
    assert "".join([*shown, rest.thought]) == parsed.thought == dialect.parse(text, SPECS).thought


def test_a_hostile_text_is_read_in_time() -> None:
    for text in ("{" * 100_000, "```\n" * 50_000, "[{" * 50_000, "<tools>" * 50_000, '{"name": ' * 30_000):
        assert read("api", text).calls == ()
