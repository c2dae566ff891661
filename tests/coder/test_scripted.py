"""The scripted policy answers with its texts in order, and can log tokens without a tokenizer."""

from __future__ import annotations

import pytest

from nano_coder.models.scripted import EOS_ID, ScriptedPolicy
from nano_shared.errors import ContextFull, PolicyError
from nano_shared.policy import Conversation, Policy
from nano_shared.types import Finish, Message, Role, Sampling


def asking(text: str) -> Conversation:
    return Conversation((Message(role=Role.USER, content=text),))


def test_it_answers_in_order() -> None:
    policy = ScriptedPolicy(["one", "two"])
    assert isinstance(policy, Policy)
    completions = [policy.complete(asking("go"), Sampling()) for _ in range(2)]
    assert [c.text for c in completions] == ["one", "two"]
    assert [c.tokens for c in completions] == [None, None]
    assert {c.finish for c in completions} == {Finish.STOP}


def test_a_script_that_has_run_out_says_so() -> None:
    policy = ScriptedPolicy(["one"], id="demo")
    policy.complete(asking("go"), Sampling())
    with pytest.raises(PolicyError, match="script of demo has run out after 1 texts"):
        policy.complete(asking("go"), Sampling())


def test_byte_tokens_rebuild_the_conversation() -> None:
    policy = ScriptedPolicy(["é", "bye"], tokens=True)
    conversation = asking("go")
    conversation.record(policy.complete(conversation, Sampling()))
    conversation.append(Message(role=Role.TOOL, content="ok"))
    completion = policy.complete(conversation, Sampling())
    conversation.record(completion)
    assert completion.tokens is not None
    assert bytes(completion.tokens.context_ids) == b"tool: ok\n"
    assert completion.tokens.sampled_ids == (*b"bye", EOS_ID)
    assert completion.tokens.logprobs == (0.0,) * 4
    assert conversation.tokens == [*b"user: go\n", *"é".encode(), EOS_ID, *b"tool: ok\n", *b"bye", EOS_ID]


def test_a_long_text_is_cut_and_closed_in_the_next_context() -> None:
    policy = ScriptedPolicy(["abcdef", "x"], tokens=True)
    conversation = asking("go")
    cut = policy.complete(conversation, Sampling(max_tokens=3))
    assert (cut.text, cut.finish) == ("abc", Finish.LENGTH)
    conversation.record(cut)
    conversation.append(Message(role=Role.TOOL, content="ok"))
    following = policy.complete(conversation, Sampling())
    assert following.tokens is not None
    assert following.tokens.context_ids == (EOS_ID, *b"tool: ok\n")


def test_its_context_can_be_full() -> None:
    policy = ScriptedPolicy(["abc"], tokens=True, context_limit=9)
    with pytest.raises(ContextFull, match=r"row has 9 tokens .* of the 9 that scripted reads"):
        policy.complete(asking("go"), Sampling())
    assert policy.complete(asking("g"), Sampling()).text == "a"


def test_it_counts_bytes() -> None:
    assert ScriptedPolicy([]).count("é") == 2
