"""Both schedulers answer every thread, early and exactly; lockstep does not look at the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.models.local.engine import Engine, kv_token_bytes
from nano_coder.models.local.policy import LocalPolicy, Lockstep, Scheduler
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest
from nano_coder.models.weights import LoadedModel, load_policy
from nano_shared.errors import PolicyError
from nano_shared.policy import Conversation
from nano_shared.types import Message, Role, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")
SCHEDULERS = pytest.mark.parametrize("kind", [Scheduler, Lockstep])


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_policy(str(tiny_folder))


class Watched(Engine):
    """The real engine, noting which rows each step finished and how long the batch was."""

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        super().__init__(loaded.model, eos_ids=frozenset(), context_limit=1024, **options)
        self.steps: list[list[tuple[int, ...]]] = []

    def step(self) -> list[DecodingRow]:
        finished = super().step()
        decoding = self.decoder.decoding if self.decoder is not None else []
        self.steps.append([(*row.request.ids, *row.ids) for row in decoding])
        return finished


def request(seed: int, *, length: int = 4) -> GenerationRequest:
    return GenerationRequest(tuple(range(3, 13 + seed % 3)), Sampling(max_tokens=length), seed)


def run(scheduler: Scheduler, agents: list[Callable[[], Any]], at_once: int | None = None) -> list[Any]:
    """Each agent in a slot of its own, begun in order, some at a time."""
    slots = scheduler.slots(len(agents), at_once or len(agents))

    def live(index: int) -> Any:
        with slots[index]:
            return agents[index]()

    with ThreadPoolExecutor(at_once or len(agents)) as pool:
        return [f.result() for f in [pool.submit(live, i) for i in range(len(agents))]]


def episode(scheduler: Scheduler, index: int, *, turns: int, pause: float) -> list[Any]:
    answers: list[Any] = []
    ids = request(index).ids
    for number in range(turns):
        time.sleep(pause * ((index * 7 + number * 3) % 5))
        asked = GenerationRequest(ids, Sampling(max_tokens=2 + index % 4), 100 * index + number)
        answers.append(scheduler.call(asked))
        ids = (*ids, *answers[-1].ids, 5, 6, 7)
    return answers


@pytest.mark.parametrize("at_once", [3, 10])
def test_lockstep_decodes_the_same_steps_whatever_the_clock_does(loaded: LoadedModel, at_once: int) -> None:
    """Ten agents of other lengths, three or ten at a time, little memory: steps, tokens, log-probs."""

    def rollout(pause: float) -> tuple[Any, Any]:
        engine = Watched(loaded, max_batch=4, kv_bytes=400 * kv_token_bytes(loaded.model))
        lockstep = Lockstep(engine, "tiny")
        agents = [lambda i=i: episode(lockstep, i, turns=1 + i % 3, pause=pause) for i in range(10)]
        return run(lockstep, agents, at_once), engine.steps

    first = rollout(0.0)
    assert first == rollout(0.003) == rollout(0.001)


@SCHEDULERS
def test_what_a_row_draws_does_not_depend_on_the_scheduler(
    kind: type[Scheduler], loaded: LoadedModel
) -> None:
    alone = Watched(loaded)
    scheduler = kind(Watched(loaded), "tiny")
    answers = run(scheduler, [lambda i=i: scheduler.call(request(i)) for i in range(6)])
    assert [a.ids for a in answers] == [alone.generate([request(i)])[0].ids for i in range(6)]


@SCHEDULERS
def test_a_short_row_is_answered_while_a_long_one_is_decoded(
    kind: type[Scheduler], loaded: LoadedModel
) -> None:
    scheduler = kind(Watched(loaded), "tiny")
    ends: dict[str, float] = {}

    def agent(name: str, length: int) -> None:
        scheduler.call(request(1, length=length))
        ends[name] = time.monotonic()

    run(scheduler, [lambda: agent("long", 400), lambda: agent("short", 2)])
    assert ends["short"] < ends["long"]


class Clock:
    """A clock that stands still but for the engine's steps, which take a second each."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Timed(Watched):
    def __init__(self, loaded: LoadedModel, clock: Clock) -> None:
        super().__init__(loaded)
        self.clock = clock

    def step(self) -> list[DecodingRow]:
        self.clock.seconds += 1
        return super().step()


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_a_step_is_on_the_clocks_of_its_rows_in_equal_shares(
    schedule: Any, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what a run waits while others are decoded is no time of its own."""
    clock = Clock()
    monkeypatch.setattr("nano_coder.models.local.policy.time", clock)
    monkeypatch.setattr("nano_coder.models.local.policy.time", clock)
    engine = Timed(loaded, clock)
    template = ChatTemplate(loaded.chat_template, loaded.tokenizer.backend_tokenizer)
    policy = LocalPolicy(engine, template, id="tiny", scheduler=schedule)
    conversations = [Conversation((Message(role=Role.USER, content="a" * 40),)) for _ in range(4)]
    agents = [lambda c=c: policy.complete(c, Sampling(max_tokens=100)) for c in conversations]
    run(policy._scheduler, agents)
    steps = len(engine.steps)
    waited = [conversation.waited for conversation in conversations]
    if schedule == "lockstep":  # all four rows are in each step: a quarter of it is a row's own
        assert waited == pytest.approx([0.75 * steps] * 4)
    # each call lasts through the 99 steps of its row at least; each step is on the clocks once
    assert sum(waited) >= 4 * 99 - steps - 1e-6
    assert all(0 <= seconds < steps for seconds in waited)


def test_a_free_request_joins_rows_that_are_being_decoded(loaded: LoadedModel) -> None:
    engine = Watched(loaded)
    scheduler = Scheduler(engine, "tiny")

    def late() -> None:
        while len(engine.steps) < 3:
            time.sleep(0.001)
        scheduler.call(request(2, length=3))

    run(scheduler, [lambda: scheduler.call(request(1, length=400)), late])
    assert [len(step) for step in engine.steps[:3]] == [1, 1, 1]
    assert 2 in [len(step) for step in engine.steps]


def test_an_agent_at_its_tools_holds_no_slot_but_its_kv(loaded: LoadedModel) -> None:
    engine = Watched(loaded, max_batch=1)
    scheduler = Scheduler(engine, "tiny")
    others = threading.Event()

    def agent() -> int:
        first = scheduler.call(request(1))
        others.wait(20)  # its tools run; the only slot serves the other agent meanwhile
        before = engine.decoder.counts.prefilled  # type: ignore[union-attr]
        scheduler.call(GenerationRequest((*request(1).ids, *first.ids, 5, 6), Sampling(max_tokens=2), 3))
        return int(engine.decoder.counts.prefilled - before)  # type: ignore[union-attr]

    def other() -> None:
        scheduler.call(request(2))
        others.set()

    assert run(scheduler, [agent, other])[0] == 3, "the observation, and the last token sampled"


@SCHEDULERS
def test_the_last_to_leave_gives_the_memory_back(kind: type[Scheduler], loaded: LoadedModel) -> None:
    engine = Watched(loaded)
    scheduler = kind(engine, "tiny")
    run(scheduler, [lambda i=i: scheduler.call(request(i)) for i in range(3)])
    assert engine.decoder is None


@SCHEDULERS
def test_a_thread_without_a_slot_is_served_beside_the_others(
    kind: type[Scheduler], loaded: LoadedModel
) -> None:
    scheduler = kind(Watched(loaded), "tiny")
    waiting = scheduler.slot(0)
    assert len(scheduler.call(request(1)).ids) == 4
    waiting.leave()


@SCHEDULERS
def test_a_leader_that_is_torn_down_leaves_nobody_waiting(kind: type[Scheduler], loaded: LoadedModel) -> None:
    class Interrupted(Watched):
        def step(self) -> list[DecodingRow]:
            if len(self.steps) == 2:
                self.steps.append([])
                raise KeyboardInterrupt
            return super().step()

    scheduler = kind(Interrupted(loaded), "tiny")

    def agent(index: int) -> Any:
        try:
            return scheduler.call(request(index, length=30))
        except (KeyboardInterrupt, PolicyError) as problem:
            return type(problem)

    kinds = run(scheduler, [lambda i=i: agent(i) for i in range(4)])
    assert kinds.count(KeyboardInterrupt) == 1
    assert run(scheduler, [lambda: scheduler.call(request(1))])[0].ids, "the next batch is served"


@SCHEDULERS
def test_many_agents_with_tools_of_any_length_all_come_home(
    kind: type[Scheduler], loaded: LoadedModel
) -> None:
    scheduler = kind(Watched(loaded, max_batch=8), "tiny")
    agents = [lambda i=i: episode(scheduler, i, turns=3, pause=0.001) for i in range(24)]
    answers = run(scheduler, agents, at_once=12)
    assert [len(a) for a in answers] == [3] * 24


@SCHEDULERS
def test_a_host_leads_alone_and_changes_no_token(loaded: LoadedModel, kind: type[Scheduler]) -> None:
    """Agents get what they get when they lead themselves, and no thread but the host's computes."""

    def rollout(hosted: bool) -> tuple[list[Any], set[int]]:
        computed: set[int] = set()

        class Traced(Engine):
            def step(self) -> list[DecodingRow]:
                computed.add(threading.get_ident())
                return super().step()

        scheduler = kind(Traced(loaded.model, eos_ids=frozenset(), context_limit=1024), "tiny")
        slots = scheduler.slots(6, 3)

        def live(index: int) -> Any:
            with slots[index]:
                return [sampled.ids for sampled in episode(scheduler, index, turns=3, pause=0.002)]

        with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
            lead = stack.enter_context(scheduler.hosted()) if hosted else None
            futures = [pool.submit(live, index) for index in range(6)]
            for future in futures:
                if lead is not None:
                    lead(future)
            return [future.result() for future in futures], computed

    hosted, computed = rollout(True)
    assert computed == {threading.get_ident()}
    assert hosted == rollout(False)[0]


def test_agents_go_on_by_themselves_when_their_host_has_left(loaded: LoadedModel) -> None:
    scheduler = Lockstep(Engine(loaded.model, eos_ids=frozenset(), context_limit=1024), "tiny")
    slots = scheduler.slots(2, 2)

    def live(index: int) -> Any:
        with slots[index]:
            return episode(scheduler, index, turns=2, pause=0.01)

    with ThreadPoolExecutor(2) as pool:
        with scheduler.hosted():
            futures = [pool.submit(live, index) for index in range(2)]
        assert [len(future.result()) for future in futures] == [2, 2]
