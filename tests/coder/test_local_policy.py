"""The local policy logs exact tokens, and batches agents in lockstep without ever blocking for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nano_coder.agent.chat_template import CHATML, ChatTemplate
from nano_coder.config import AgentConfig
from nano_coder.models.local.continuous_batching import ContinuousDecoder
from nano_coder.models.local.engine import Engine, kv_token_bytes
from nano_coder.models.local.policy import LocalPolicy, SchedulerKind
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest
from nano_coder.models.opening import open_policy
from nano_coder.models.weights import LoadedModel, load_policy
from nano_shared.errors import ConfigError, ContextFull, PolicyError, UsageError
from nano_shared.policy import Conversation, Policy
from nano_shared.types import Completion, Finish, Message, Role, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


class RecordingEngine(Engine):
    """The real engine, noting the prompts that were admitted together."""

    batches: list[list[tuple[int, ...]]]

    def add_requests(self, requests: Any) -> list[DecodingRow]:
        if requests:
            self.batches.append([request.ids for request in requests])
        return super().add_requests(requests)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_policy(str(tiny_folder))


@pytest.fixture(scope="module")
def template(loaded: LoadedModel) -> ChatTemplate:
    return ChatTemplate(CHATML, loaded.tokenizer)


@pytest.fixture
def policy(loaded: LoadedModel, template: ChatTemplate) -> LocalPolicy:
    return policy_of(loaded, template)


def policy_of(
    loaded: LoadedModel,
    template: ChatTemplate,
    context: int = 1024,
    scheduler: SchedulerKind = "lockstep",
    **options: Any,
) -> LocalPolicy:
    engine = RecordingEngine(
        loaded.model,
        eos_ids=loaded.eos_ids,
        context_limit=context,
        decode=template.encoder.decode,
        **options,
    )
    engine.batches = []
    return LocalPolicy(engine, template, id=loaded.id, version=3, scheduler=scheduler)


def batches(policy: LocalPolicy) -> list[list[tuple[int, ...]]]:
    assert isinstance(policy.engine, RecordingEngine)
    return policy.engine.batches


def asking(text: str) -> Conversation:
    return Conversation((Message(role=Role.USER, content=text),))


def run_agents(policy: LocalPolicy, agents: list[Callable[[], Any]]) -> list[Any]:
    """Each agent in a thread and a slot of its own; results, or what was raised."""
    slots = [policy.agent(index) for index in range(len(agents))]

    def live(index: int) -> Any:
        try:
            with slots[index]:
                return agents[index]()
        except (PolicyError, ContextFull, ZeroDivisionError) as error:
            return error

    with ThreadPoolExecutor(len(agents)) as pool:
        futures = [pool.submit(live, index) for index in range(len(agents))]
        return [future.result() for future in futures]


def agent(policy: LocalPolicy, index: int, *, turns: int = 3, jitter: float = 0.0) -> Conversation:
    conversation = asking(f"task {index} " * (index + 1))
    for turn in range(turns):
        time.sleep(jitter * ((index * 7 + turn * 3) % 5))
        completion = policy.complete(conversation, Sampling(max_tokens=6, seed=100 * index + turn))
        conversation.record(completion)
        conversation.append(Message(role=Role.TOOL, content=f"observation {turn}"))
    return conversation


def test_it_is_a_policy(policy: LocalPolicy) -> None:
    assert isinstance(policy, Policy)
    assert policy.context_limit == 1024
    assert policy.count("two words") >= 2


def test_a_completion_carries_its_exact_tokens(policy: LocalPolicy, loaded: LoadedModel) -> None:
    conversation = asking("hi")
    sampling = Sampling(max_tokens=6, seed=1)
    completion = policy.complete(conversation, sampling)
    assert completion.tokens is not None
    assert completion.tokens.context_ids == policy.template.delta(conversation)
    assert completion.text == loaded.tokenizer.decode(completion.tokens.sampled_ids)
    assert (completion.policy_id, completion.policy_version) == (loaded.id, 3)
    assert completion.sampling == sampling
    assert conversation.tokens == []


def test_later_turns_extend_the_row(policy: LocalPolicy) -> None:
    conversation = agent(policy, 0)
    rows = [ids for batch in batches(policy) for ids in batch]
    assert rows[0] == rows[1][: len(rows[0])]
    assert rows[1] == rows[2][: len(rows[1])]
    assert rows[2] == tuple(conversation.tokens[: len(rows[2])])


def test_logged_logprobs_are_those_of_the_row(policy: LocalPolicy) -> None:
    conversation = asking("hi")
    for turn in range(2):
        completion = policy.complete(conversation, Sampling(max_tokens=6, seed=turn))
        conversation.record(completion)
        conversation.append(Message(role=Role.TOOL, content="ok"))
        assert completion.tokens is not None
        sampled = len(completion.tokens.sampled_ids)
        scores = policy.engine.score([tuple(conversation.tokens)])[0][-sampled:]
        assert completion.tokens.logprobs == pytest.approx(scores, abs=1e-4)


def test_the_end_of_turn_is_logged_but_not_text(loaded: LoadedModel, template: ChatTemplate) -> None:
    free = policy_of(loaded, template).complete(asking("hi"), Sampling(max_tokens=6, seed=1))
    assert free.tokens is not None
    third = free.tokens.sampled_ids[2]
    engine = Engine(loaded.model, eos_ids=frozenset({third}), context_limit=1024)
    stopped = LocalPolicy(engine, template, id="x").complete(asking("hi"), Sampling(max_tokens=6, seed=1))
    assert stopped.finish is Finish.STOP
    assert stopped.tokens is not None
    first = free.tokens.sampled_ids.index(third)
    assert stopped.tokens.sampled_ids == free.tokens.sampled_ids[: first + 1]
    assert stopped.text == template.encoder.decode(free.tokens.sampled_ids[:first])


def test_lockstep_reproduces_bit_for_bit(loaded: LoadedModel, template: ChatTemplate) -> None:
    """Eight threads with other timings each time: the same batches, tokens and log-probs."""

    def rollout(jitter: float) -> tuple[list[list[int]], list[list[tuple[int, ...]]]]:
        policy = policy_of(loaded, template)
        agents = [lambda i=i: agent(policy, i, turns=2 + i % 3, jitter=jitter) for i in range(8)]
        conversations = run_agents(policy, agents)
        return [conversation.tokens for conversation in conversations], batches(policy)

    first = rollout(0.0)
    assert first == rollout(0.004)
    assert [len(batch) for batch in first[1]] == [8, 8, 5, 2]


def test_a_batch_is_in_the_order_of_the_slots(loaded: LoadedModel, template: ChatTemplate) -> None:
    policy = policy_of(loaded, template)
    run_agents(policy, [lambda i=i: agent(policy, i, turns=1, jitter=0.002 * (4 - i)) for i in range(4)])
    (batch,) = batches(policy)
    assert [len(ids) for ids in batch] == sorted(len(ids) for ids in batch)


def test_a_batch_smaller_than_the_round_gives_the_same_rows(
    loaded: LoadedModel, template: ChatTemplate
) -> None:
    """Rows join as others end; what each draws does not depend on it."""

    def rollout(size: int) -> list[list[int]]:
        policy = policy_of(loaded, template, max_batch=size)
        agents = [lambda i=i: agent(policy, i, turns=1 + i % 2) for i in range(8)]
        return [conversation.tokens for conversation in run_agents(policy, agents)]

    assert rollout(3) == rollout(64)


def test_an_agent_that_dies_blocks_nobody(policy: LocalPolicy) -> None:
    def dies() -> None:
        agent(policy, 1, turns=1)
        raise ZeroDivisionError

    results = run_agents(policy, [lambda: agent(policy, 0), dies, lambda: agent(policy, 2)])
    assert isinstance(results[1], ZeroDivisionError)
    assert all(isinstance(results[i], Conversation) for i in (0, 2))
    assert [len(batch) for batch in batches(policy)] == [3, 2, 2]


def test_an_agent_whose_context_is_full_blocks_nobody(loaded: LoadedModel, template: ChatTemplate) -> None:
    policy = policy_of(loaded, template, context=80)
    long = asking("too long " * 80)
    results = run_agents(
        policy,
        [lambda: agent(policy, 0, turns=1), lambda: policy.complete(long, Sampling())],
    )
    assert isinstance(results[0], Conversation)
    assert isinstance(results[1], ContextFull)


def test_a_slot_that_nobody_enters_can_be_given_up(policy: LocalPolicy) -> None:
    empty = policy.agent(9)
    threading.Timer(0.05, empty.leave).start()
    (conversation,) = run_agents(policy, [lambda: agent(policy, 0, turns=1)])
    assert len(conversation.tokens) > 0


def test_an_index_has_one_slot(policy: LocalPolicy) -> None:
    with policy.agent(4):
        with pytest.raises(UsageError, match="agent 4 has a slot already"):
            policy.agent(4)
    with policy.agent(4):
        agent(policy, 4, turns=1)


def test_a_thread_without_a_slot_is_served_at_once(policy: LocalPolicy) -> None:
    waiting = policy.agent(0)
    completion = policy.complete(asking("hi"), Sampling(max_tokens=2, seed=0))
    waiting.leave()
    assert isinstance(completion, Completion)


def test_an_engine_that_fails_fails_every_agent_of_its_batch(
    loaded: LoadedModel, template: ChatTemplate
) -> None:
    class OutOfMemory(Engine):
        def step(self) -> list[DecodingRow]:
            raise RuntimeError("out of memory")

    engine = OutOfMemory(loaded.model, eos_ids=frozenset(), context_limit=100)
    policy = LocalPolicy(engine, template, id="tiny")
    results = run_agents(policy, [lambda i=i: agent(policy, i) for i in range(3)])
    assert all(isinstance(result, PolicyError) for result in results)
    assert "the engine of tiny failed on a batch of 3 rows" in str(results[0])
    assert "out of memory" in str(results[2])


def test_an_interrupted_batch_leaves_nobody_waiting(loaded: LoadedModel, template: ChatTemplate) -> None:
    class Interrupted(Engine):
        def step(self) -> list[DecodingRow]:
            raise ZeroDivisionError  # stands for whatever the policy does not expect

    engine = Interrupted(loaded.model, eos_ids=frozenset(), context_limit=100)
    policy = LocalPolicy(engine, template, id="tiny")
    results = run_agents(policy, [lambda i=i: agent(policy, i) for i in range(3)])
    kinds = sorted(type(result).__name__ for result in results)
    assert kinds == ["PolicyError", "PolicyError", "ZeroDivisionError"]


def test_ac_30_a_row_that_does_not_fit_is_refused_before_sampling(
    loaded: LoadedModel, template: ChatTemplate
) -> None:
    length = len(template.delta(asking("hi")))
    exact = policy_of(loaded, template, context=length)
    with pytest.raises(ContextFull, match=rf"row has {length} tokens .* of the {length}"):
        exact.complete(asking("hi"), Sampling(max_tokens=1))
    assert batches(exact) == []


def test_a_completion_is_cut_to_what_fits(loaded: LoadedModel, template: ChatTemplate) -> None:
    length = len(template.delta(asking("hi")))
    policy = policy_of(loaded, template, context=length + 2)
    completion = policy.complete(asking("hi"), Sampling(max_tokens=50, seed=1))
    assert completion.tokens is not None
    assert (len(completion.tokens.sampled_ids), completion.finish) == (2, Finish.LENGTH)


def test_requests_carry_the_seed_of_their_call(policy: LocalPolicy, loaded: LoadedModel) -> None:
    delta = policy.template.delta(asking("hi"))
    sampling = Sampling(max_tokens=6, seed=7)
    (expected,) = policy.engine.generate([GenerationRequest(delta, sampling, 7)])
    completion = policy.complete(asking("hi"), sampling)
    assert completion.tokens is not None
    assert completion.tokens.sampled_ids == expected.ids


def test_a_setting_bounds_the_kv_cache(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit waits, and gets the same tokens; a row that cannot fit is refused, by name."""

    def opened(tokens: int) -> LocalPolicy:
        size = tokens * kv_token_bytes(load_policy(str(tiny_folder)).model) / 2**30
        policy = open_policy(str(tiny_folder), AgentConfig(profile="compact-1", kv_gib=size)).policy
        assert isinstance(policy, LocalPolicy)
        return policy

    def answers(policy: LocalPolicy) -> tuple[list[Any], int]:
        requests = [GenerationRequest((3, 4, 5 + n), Sampling(max_tokens=8), n) for n in range(4)]
        rows = policy.engine.add_requests(requests)
        policy.engine.step()
        decoder = policy.engine.decoder
        assert isinstance(decoder, ContinuousDecoder)
        at_once = len(decoder.decoding)
        while policy.engine.busy:
            policy.engine.step()
        return [row.ids for row in rows], at_once

    (many, four), (few, one) = answers(opened(1_000_000)), answers(opened(100))
    assert (many, four, one) == (few, 4, 1)
    assert "holds rows of 36 tokens of this model" in capsys.readouterr().err
    with pytest.raises(ContextFull, match="kv_gib"):
        opened(100).complete(asking("x" * 200), Sampling(max_tokens=8))
    with pytest.raises(ConfigError, match=r"kv_gib = .* give at least"):
        opened(10)
