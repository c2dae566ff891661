"""A model's own chat template: prompt ids equal those of `apply_chat_template`, and rows grow or begin."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tongues
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_coder.agent.chat_template import NativeTemplate, dialect_of, shows_tools
from nano_coder.agent.dialects.dialect import DIALECTS, function_schema
from nano_coder.models.weights import end_of_turn
from nano_coder.tools.tool import TOOLS
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Finish, Message, Role, Sampling, ToolCall, TurnTokens

TOOLS_SHOWN = (TOOLS["shell"].spec, TOOLS["read_file"].spec)
SCHEMAS = [function_schema(tool) for tool in TOOLS_SHOWN]
NOON = 1_764_000_000.0


@cache
def template(family: str) -> NativeTemplate:
    made, source = tongues.tokenizer(family), tongues.source(family)
    return NativeTemplate(source, made, DIALECTS[tongues.DIALECTS[family]], end_of_turn(made, source))


@pytest.fixture(scope="module", params=tongues.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def by_transformers(
    family: str, messages: list[dict[str, Any]], tools: Any, prompt: bool = True
) -> list[int]:
    """What anybody else would feed to the model."""
    made = tongues.tokenizer(family)
    out = made.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=True)
    return list(out["input_ids"])


def say(native: NativeTemplate, conversation: Conversation, ids: list[int], text: str) -> None:
    row, context = native.next_row(conversation)
    tokens = TurnTokens(row=row, context_ids=context, sampled_ids=tuple(ids), logprobs=(-1.0,) * len(ids))
    conversation.record(
        Completion(text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="test")
    )


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20).filter(
    lambda t: "<" not in t and "[" not in t and "`" not in t
)
said = words.map(str.strip).filter(lambda t: t and not t.startswith("{"))
calls = st.one_of(
    st.builds(lambda command: ToolCall(name="shell", arguments={"command": command}), words),
    st.builds(
        lambda path, n: ToolCall(name="read_file", arguments={"path": path, "start": n}),
        words,
        st.integers(1, 9),
    ),
)
rounds = st.lists(
    st.tuples(
        st.one_of(st.just(""), said), st.lists(calls, max_size=2), st.lists(said, min_size=2, max_size=2)
    ),
    max_size=4,
)
"""of each turn what is said, what is called, and the results (or what the user says next)"""


drawn = given(system=said, task=said, turns=rounds, tools=st.booleans())
Rounds = list[tuple[str, list[ToolCall], list[str]]]


@pytest.mark.some(3)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@drawn
def test_prompts_equal_those_of_transformers(
    family: str, system: str, task: str, turns: Rounds, tools: bool
) -> None:
    equal(family, system, task, turns, tools)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@drawn
def test_prompts_of_many_conversations_equal_those_of_transformers(
    family: str, system: str, task: str, turns: Rounds, tools: bool
) -> None:
    equal(family, system, task, turns, tools)


def equal(family: str, system: str, task: str, turns: Rounds, tools: bool) -> None:
    native, dialect = template(family), DIALECTS[tongues.DIALECTS[family]]
    shown = TOOLS_SHOWN if tools else ()
    conversation = Conversation(
        (Message(role=Role.SYSTEM, content=system), Message(role=Role.USER, content=task)), tools=shown
    )
    for thought, called, results in turns:
        text = dialect.render(thought, called, shown) if thought or called else "-"
        row, context = native.next_row(conversation)
        before = conversation.tokens if row == conversation.row else []
        say(
            native,
            conversation,
            list(native.written((*before, *context), text, tongues.tokenizer(family).eos_token_id)),
            text,
        )
        if not called:
            conversation.append(Message(role=Role.USER, content=results[0]))
        for _, result in zip(called, results, strict=False):
            conversation.append(Message(role=Role.TOOL, content=result))
    before = list(conversation.tokens)
    row, context = native.next_row(conversation)
    prompt = [*before, *context] if row == conversation.row else list(context)
    messages = native.messages(conversation, row=row)
    assert prompt == by_transformers(family, messages, SCHEMAS if tools else None)
    bos = tongues.tokenizer(family).bos_token_id
    assert bos is None or prompt.count(bos) == ("bos_token" in tongues.source(family))
    texts = json.dumps(messages, ensure_ascii=False)
    assert all(json.dumps(r, ensure_ascii=False)[1:-1] in texts for _, c, rs in turns for r in rs[: len(c)])


@pytest.mark.some(5)
def test_the_tools_and_the_dialect_are_read_from_the_template(family: str) -> None:
    source = tongues.source(family)
    assert (dialect_of(source) or "hermes-json") == tongues.DIALECTS[family]
    shown = shows_tools(tongues.tokenizer(family), source)
    assert shown == (family not in ("gemma-3", "gemma-2", "phi-3", "smollm2"))


def test_roles_that_a_template_lacks_are_folded() -> None:
    native = template("gemma-2")
    conversation = Conversation(
        (Message(role=Role.SYSTEM, content="S"), Message(role=Role.USER, content="U"))
    )
    say(native, conversation, [300], '```tool_code\nshell(command="a")\n```\n```tool_code\nsubmit()\n```')
    conversation.append(Message(role=Role.TOOL, content="one"))
    conversation.append(Message(role=Role.TOOL, content="two"))
    given = [(m["role"], m["content"]) for m in native.messages(conversation, row=0)]
    assert (given[0], given[2]) == (("user", "S\n\nU"), ("user", "one\ntwo"))


def test_a_template_that_drops_reasoning_begins_a_row() -> None:
    native = template("qwen-3")
    conversation = Conversation((Message(role=Role.USER, content="Go."),), tools=TOOLS_SHOWN, started=NOON)
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    text = f"<think>\nHm.\n</think>\n\n{call}"
    for said_next in (Role.TOOL, Role.TOOL):
        row, context = native.next_row(conversation)
        assert row == 0  # within its work the model sees its reasoning
        before = (*conversation.tokens, *context)
        say(native, conversation, list(native.written(before, text, 0)), text)
        conversation.append(Message(role=said_next, content="a.py"))
    conversation.append(Message(role=Role.USER, content="And now?"))
    row, context = native.next_row(conversation)
    assert row == 1
    shown = native.encoder.decode(context)
    assert (shown.count("Hm."), shown.count('<tool_call>\n{"name": "shell"')) == (0, 2)
    assert list(context) == by_transformers("qwen-3", native.messages(conversation, row=1), SCHEMAS)
    say(native, conversation, list(native.written(context, "Done.", 0)), "Done.")
    assert (conversation.row, conversation.tokens[: len(context)]) == (1, list(context))


def test_sampled_tokens_are_kept_where_the_tokenizer_would_write_others() -> None:
    native = template("qwen-2.5")
    conversation = Conversation((Message(role=Role.USER, content="Go."),))
    letters = [native.encoder.text(letter)[0] for letter in "the"]
    assert letters != native.encoder.text("the")
    say(native, conversation, [*letters, tongues.tokenizer("qwen-2.5").eos_token_id], "the")
    conversation.append(Message(role=Role.USER, content="And?"))
    row, context = native.next_row(conversation)
    assert row == 0
    assert native.encoder.decode(context) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_content_cannot_write_control_tokens() -> None:
    native = template("qwen-2.5")
    conversation = Conversation((Message(role=Role.USER, content="a<|im_end|>b"),))
    ends = tongues.tokenizer("qwen-2.5").eos_token_id
    assert native.delta(conversation).count(ends) == 2  # of the system message and the user's


def test_the_date_is_that_of_the_run() -> None:
    conversation = Conversation((Message(role=Role.USER, content="Go."),), started=NOON)
    assert "24 Nov 2025" in template("llama-3").encoder.decode(template("llama-3").delta(conversation))
