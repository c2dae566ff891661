"""What a redacted run may teach: its texts, and nothing that was hidden."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from integration.tiny_model import build_tiny
from nano_coder.agent.chat_template import CHATML, ChatTemplate
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_logs.redact.runs import scrub_trajectory
from nano_rl.imitation import RunEncoder, succeeded
from nano_shared.policy import Conversation
from nano_shared.types import (
    MARKER,
    REDACTED_ID,
    Completion,
    Finish,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)

SECRET = "glpat-" + "aB3dE6gH9jK2mN5pQ8sT"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RunEncoder:
    texts = [m.content for m in first_messages(COMPACT_1, Task(key="k", prompt="Say hello."), ())]
    folder = build_tiny(tmp_path_factory.mktemp("tiny"), texts, hidden=32, layers=1, vocab_size=400)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return RunEncoder(
        profile=COMPACT_1, template=ChatTemplate(CHATML, tokenizer), eos_id=tokenizer.eos_token_id
    )


def run(reader: RunEncoder, prompt: str, *texts: str) -> Trajectory:
    """A success of turns without tools, with the tokens that the policy would have had."""
    task = Task(key="k", prompt=prompt)
    conversation = Conversation(first_messages(COMPACT_1, task, ()))
    turns = []
    for index, text in enumerate(texts):
        sampled = (*reader.template.encoder.text(text), reader.eos_id)
        tokens = TurnTokens(
            context_ids=reader.template.delta(conversation),
            sampled_ids=sampled,
            logprobs=(-1.0,) * len(sampled),
        )
        completion = Completion(
            text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="tiny"
        )
        conversation.record(completion)
        turns.append(Turn(index=index, completion=completion, parser="compact", started=0, ended=0))
    return Trajectory(
        id="r", task=task, turns=tuple(turns), stop=StopReason.FINISHED, runtime_version="0",
        profile=COMPACT_1.name, profile_hash=COMPACT_1.hash, template_hash=reader.template.template_hash,
        tools_hash=COMPACT_1.tools_hash, policy="tiny", started=0.0,
        verdict=Verdict(reward=1.0, trust=Trust.HIDDEN, grader="t", graded_hash="g"),
    )  # fmt: skip


def test_a_run_with_a_hidden_prompt_is_imitated_from_its_text(reader: RunEncoder) -> None:
    """A real tokenizer: exactly the ids that spell the secret are hidden, all others stay where they were."""
    decode = reader.template.encoder.decode
    before = run(reader, f"Say hello to {SECRET} now.", "hello")
    after = scrub_trajectory(before, decode=decode)
    old, new = before.turns[0].completion.tokens, after.turns[0].completion.tokens
    assert old is not None
    assert new is not None
    hidden = [a for a, b in zip(old.context_ids, new.context_ids, strict=True) if b == REDACTED_ID]
    assert SECRET in decode(hidden)
    assert len(decode(hidden)) <= len(SECRET) + 8
    assert new.sampled_ids == old.sampled_ids
    assert reader.reads(before)
    assert after.is_redacted
    assert not reader.reads(after)
    assert succeeded(after)
    (row,) = reader.rows(after)
    assert REDACTED_ID not in row.ids
    assert MARKER.search(decode(row.ids))
    assert decode([i for i, m in zip(row.ids, row.mask, strict=True) if m]).startswith("hello")


def test_nobody_learns_to_write_markers(reader: RunEncoder) -> None:
    decode = reader.template.encoder.decode
    after = scrub_trajectory(run(reader, "Say hello.", f"use {SECRET}", "hello"), decode=decode)
    (row,) = reader.rows(after)
    trained = decode([i for i, m in zip(row.ids, row.mask, strict=True) if m])
    assert "hello" in trained
    assert "redacted" not in trained
    assert not succeeded(scrub_trajectory(run(reader, "Say hello.", f"use {SECRET}"), decode=decode))
