"""Dialects: parse and render are inverses, and a malformed action is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_coder.agent.dialects.dialect import DIALECTS, Compact
from nano_coder.agent.dialects.native import HERMES
from nano_coder.tools.tool import TOOLS
from nano_shared.types import ToolCall

SPECS = tuple(tool.spec for tool in TOOLS.values())
text = st.text(st.characters(exclude_categories=["Cs"]))
line = st.one_of(st.none(), st.integers())

calls = st.one_of(
    st.builds(
        lambda path, new, n: ToolCall(name="edit_file", arguments={"path": path, "line": n, "new": new}),
        text, text, line,
    ),
    st.builds(
        lambda path, new, old: ToolCall(name="edit_file", arguments={"path": path, "old": old, "new": new}),
        text, text, text,
    ),
    st.builds(lambda command: ToolCall(name="shell", arguments={"command": command}), text),
    st.builds(lambda pattern: ToolCall(name="search", arguments={"pattern": pattern}), text),
    st.builds(lambda answer: ToolCall(name="submit", arguments={"answer": answer}), text),
    st.just(ToolCall(name="submit")),
    st.builds(lambda x: ToolCall(name="no_such_tool", arguments={"x": x}), text),
)  # fmt: skip
thoughts = text.filter(lambda t: "@" not in t and "<" not in t and not t.endswith("\n"))


@given(thoughts, calls)
def test_compact_parses_what_it_renders(thought: str, call: ToolCall) -> None:
    parsed = Compact().parse(Compact().render(thought, [call], SPECS), SPECS)
    assert (parsed.error, parsed.thought, parsed.calls) == (None, thought, (call,))


@given(thoughts, st.lists(calls, min_size=1, max_size=3))
def test_hermes_parses_what_it_renders(thought: str, several: list[ToolCall]) -> None:
    parsed = HERMES.parse(HERMES.render(thought, several, SPECS), SPECS)
    assert (parsed.error, parsed.thought, list(parsed.calls)) == (None, thought, several)


def test_compact_reads_what_a_small_model_writes() -> None:
    parsed = Compact().parse("The sum is wrong.\n@edit_file path=stats.py line=4\n    return total", SPECS)
    assert parsed.thought == "The sum is wrong."
    assert parsed.calls == (
        ToolCall(name="edit_file", arguments={"path": "stats.py", "line": 4, "new": "    return total"}),
    )


def test_a_closing_tag_inside_a_string_does_not_end_a_hermes_call() -> None:
    call = ToolCall(name="shell", arguments={"command": "echo '</tool_call><tool_call>'"})
    assert HERMES.parse(HERMES.render("", [call], SPECS), SPECS).calls == (call,)


def test_hermes_forgives_a_missing_closing_tag_and_says_so() -> None:
    parsed = HERMES.parse('<tool_call>{"name": "submit", "arguments": {}}', SPECS)
    assert parsed.calls == (ToolCall(name="submit"),)
    assert parsed.repairs == ("closed_tag",)


@pytest.mark.parametrize(
    ("dialect", "text", "complaint"),
    [
        ("compact", "I am done.", "no action found"),
        ("compact", "@edit_file path=a.py line=four\nx", "`four` is not a value"),
        ("compact", "@read_file path=a.py path=b.py", "path is given twice"),
        ("compact", "@read_file a.py", "cannot read `a.py` as key=value"),
        ("compact", "@read_file path=a.py\nmore", "takes no text below"),
        ("hermes", "I am done.", "no tool call found"),
        ("hermes", "<tool_call>{name submit}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'object with a "name"'),
        ("hermes", '<tool_call>{"name": "submit", "arguments": []}</tool_call>', "must be an object"),
    ],
)
def test_a_malformed_action_is_an_error_that_shows_the_right_form(
    dialect: str, text: str, complaint: str
) -> None:
    parsed = DIALECTS[dialect].parse(text, SPECS)
    assert parsed.calls == ()
    assert parsed.error is not None
    assert complaint in parsed.error
    assert "write" in parsed.error
