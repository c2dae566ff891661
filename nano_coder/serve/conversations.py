"""Conversations of clients: found again by their messages, continued as sampled, logged as runs.

A request whose messages begin with those of an earlier one and its answer continues that conversation's
tokens: the answer is never rendered or encoded again. Any other history begins a new row.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from nano_coder import __version__
from nano_coder.agent.dialects.api import API
from nano_coder.agent.dialects.dialect import DIALECTS, Parsed, StreamParser, function_schema
from nano_coder.agent.loop import turn_seed
from nano_coder.agent.profiles import describing
from nano_coder.agent.prompt import system_text
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve import upstream
from nano_coder.serve.given_reward import end_conversation, give_reward
from nano_coder.serve.request import (
    ClientCall,
    ClientMessage,
    ModelAnswer,
    ModelRequest,
    OnText,
    TextDelta,
    split_at_stop,
)
from nano_coder.serve.text_stream import TextStream
from nano_shared.errors import BudgetExhausted, ContextFull, LogError, PolicyError
from nano_shared.hashing import content_hash
from nano_shared.policy import Conversation, Policy
from nano_shared.profile import InterfaceProfile
from nano_shared.redact.redactor import MARKER
from nano_shared.rows import ClientRequest
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import (
    AMBIGUOUS_TOOLS,
    CLIENT_TOOLS,
    RAW_PROMPT,
    Completion,
    Message,
    Provenance,
    Role,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from nano_coder.models.local.sampler import Likeliest

MOST_HELD = 1024
"""conversations that can be continued; the one that was used longest ago is forgotten first"""
_PATIENCE_SECONDS = 60.0
"""for turns that are being sampled when their agent ends; each ends with its next token"""
GENERATOR = "nano-serve 1"
_TASK_PREFIX = "served-"


class ClientSession(NamedTuple):
    """What a client's conversations are of: another owner's session of the same name is another."""

    name: str = ""
    """empty for a client that named none"""
    owner: str = ""
    """of its key; empty without one"""
    run: str = ""
    """the client's own run, which logs what is answered; empty where the server does"""

    @property
    def label(self) -> str:
        """One name for both, for a server behind."""
        return f"{self.name}@{self.owner}" if self.owner else self.name


_NAMELESS = ClientSession()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A policy that is served, and the log of what it answers."""

    policy: Policy
    profile: InterfaceProfile
    store: LogStore
    name: str
    """the policy as the user named it"""

    @property
    def upstream(self) -> EndpointPolicy | None:
        """The server behind, to which calls and tools go as the API has them."""
        found = self.policy
        return found if isinstance(found, EndpointPolicy) and self.profile.dialect == API.name else None


@dataclass(slots=True, kw_only=True)
class AgentEpisode:
    """A run that a foreign agent makes: its conversations get this task, sampling and limits."""

    run: Trajectory
    """without turns; the first conversation gets its id"""
    sampling: Sampling
    """what the agent asks for is not used, but for a smaller number of tokens, stop strings and the like"""
    slot: int | None = None
    """the policy's slot of the agent"""
    turns: int = 0
    tokens: int = 0
    """sampled so far"""
    reached: StopReason | None = None
    """the limit that was reached"""
    overflowed: bool = False
    """whether the last request did not fit the context"""
    limited: threading.Event = field(default_factory=threading.Event)
    """set when the agent gets no answers any more"""
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asking: int = 0
    """requests that are being answered"""
    _asked: float = 0.0
    """when the first of them came"""
    _queued: float = 0.0
    """seconds that those of them which are answered waited for other agents of the batch"""
    _waited: float = 0.0
    """the same of all before"""

    @contextmanager
    def asking(self, conversation: Conversation) -> Iterator[None]:
        """While a request is answered, whose seconds of waiting `conversation` then says."""
        with self._lock:
            if not self._asking:
                self._asked = time.monotonic()
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                self._queued += conversation.waited
                if not self._asking:
                    self._waited += min(self._queued, time.monotonic() - self._asked)
                    self._queued = 0.0

    @property
    def seconds(self) -> float:
        """Of the run so far, without waiting for other agents of the batch; a batch's answer counts when it
        is there."""
        with self._lock:
            now = time.monotonic()
            pending = now - self._asked if self._asking and self.slot is not None else 0.0
            return now - self.began - self._waited - pending

    def reach(self, stop: StopReason) -> None:
        """The run is over for that reason, if it was not before."""
        self.reached = self.reached or stop
        self.limited.set()


class RunEnded(BudgetExhausted):
    """The episode has used up its turns or tokens, or its policy failed: it gets no answer any more."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Held:
    """A conversation that can be continued."""

    run: Trajectory
    model: ServedModel
    """that answers it to its end"""
    session: ClientSession
    client: str = ""
    """user agent of the last request"""
    owner: int
    """for which the policy keeps KV"""
    keys: list[str] = field(default_factory=list)
    """of each turn: the conversation's hash after its answer"""
    busy: bool = False
    """whether its next turn is being sampled"""
    ended: bool = False
    touched: float = field(default_factory=time.monotonic)


class UnknownSession(LookupError):
    """No conversation was logged in that session."""


class Conversations:
    """Answers requests, and logs each as a turn of a run. Thread-safe."""

    def __init__(self, model: ServedModel, episode: AgentEpisode | None = None) -> None:
        """`episode` is the run that a foreign agent makes; without one every opening is a task."""
        self.model = model
        """answers what begins now; requests in flight are answered by the one that they began with"""
        self._episode = episode
        self._lock = threading.Condition()
        """notified when a turn was sampled"""
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._by_key: dict[tuple[ClientSession, str], list[tuple[_Held, int]]] = {}
        self._sought: list[tuple[ClientSession, frozenset[str]]] = []
        """session and keys of each request that looks for its conversation, which is held meanwhile"""
        self._owners = 0
        self._began = time.time()

    @property
    def is_rollout(self) -> bool:
        """Whether a foreign agent's run is made here."""
        return self._episode is not None

    # ---------------------------------------------------------------------------------- answering

    def answer(
        self, request: ModelRequest, session: ClientSession = _NAMELESS, on_text: OnText | None = None,
        model: ServedModel | None = None, client: str = "",
    ) -> ModelAnswer:  # fmt: skip
        """Sample the next turn of a conversation, and log it, with the user agent of its client.

        `model` None: by the one that is served now.

        Raises ContextFull for messages that leave no room, and PolicyError if the backend fails; neither is
        logged.
        """
        request, keys = self._limited(request), request.keys()
        model = model or self.model
        session = session._replace(run=self._logging_run(session.run, model))
        with self._seeking(session, keys):
            self._recall(request, keys, session, model)
            held, new = self._place(request, keys, session, model)
        held.client = client
        try:
            return self._sample(held, new, request, keys[-1], on_text)
        except ContextFull:  # the agent may compact its history
            if self._episode is not None:
                self._episode.overflowed = True
            raise
        except PolicyError:
            if self._episode is not None:
                self._episode.reach(StopReason.POLICY_ERROR)
            raise
        finally:
            with self._lock:
                held.busy = False
                held.touched = time.monotonic()
                if not held.run.own_turns:
                    self._forget(held)
                self._lock.notify_all()

    def _logging_run(self, run: str, model: ServedModel) -> str:
        """The run that a client names, where it is open in this log, which then has the answers already; else
        none. A client that cannot read the log knows no such id."""
        return run if run and self._episode is None and model.store.is_open(run) else ""

    def _limited(self, request: ModelRequest) -> ModelRequest:
        """The request under the sampling of the episode. Raises RunEnded."""
        episode = self._episode
        if episode is None:
            return request
        limits, asked = episode.run.task.limits, request.sampling
        with self._lock:
            left = limits.max_tokens - episode.tokens
            if left <= 0 or episode.turns >= limits.max_turns:
                episode.reach(StopReason.MAX_TOKENS if left <= 0 else StopReason.MAX_TURNS)
            if episode.reached is not None:
                raise RunEnded(f"this run has ended ({episode.reached.value}) and gets no further answer")
            number, episode.turns = episode.turns, episode.turns + 1
        sampling = episode.sampling.model_copy(
            update={
                "max_tokens": min(asked.max_tokens, episode.sampling.max_tokens, left), "stop": asked.stop,
                "seed": turn_seed(episode.run.seed, number), "grammar": asked.grammar,
            }
        )  # fmt: skip
        return replace(request, sampling=sampling, more={})

    @contextmanager
    def _seeking(self, session: ClientSession, keys: Sequence[str]) -> Iterator[None]:
        """Meanwhile no conversation is forgotten that one of the keys is of."""
        sought = (session, frozenset(keys))
        with self._lock:
            self._sought.append(sought)
        try:
            yield
        finally:
            with self._lock:
                self._sought.remove(sought)

    def _is_sought(self, held: _Held) -> bool:
        return any(
            held.session == session and not keys.isdisjoint(held.keys) for session, keys in self._sought
        )

    def _recall(
        self, request: ModelRequest, keys: Sequence[str], session: ClientSession, model: ServedModel
    ) -> None:
        """Hold those of the log's conversations that the request may continue, where none is held: they are
        of an earlier server, or were forgotten."""
        answered = [at for at, m in enumerate(request.messages[:-1]) if m.role is Role.ASSISTANT]
        with self._lock:
            held = [at for at in answered if (session, keys[at]) in self._by_key]
        missing = [keys[at] for at in answered if not held or at > held[-1]]
        if self._episode is not None or session.run or not missing:
            return
        found = model.store.answers(session.name, session.owner, missing)
        longest = max((missing.index(key) for _, _, key in found), default=-1)
        for run, _, key in found:
            if key == missing[longest]:
                self._hold_again(run, session, model)

    def _hold_again(self, run_id: str, session: ClientSession, model: ServedModel) -> None:
        """Hold a conversation of the log, if this model reads what it read and nothing of it was hidden.

        It goes on as itself if it is open, and these weights and no other live server answered it last.
        """
        run = model.store.get(run_id)
        keys = model.store.conversations(run_id)
        mine = (model.policy.template_hash, model.profile.hash)
        if (
            (run.template_hash, run.profile_hash) != mine
            or len(keys) != len(run.turns)
            or not _is_unredacted(run)
        ):
            return
        last = run.turns[-1].completion
        with self._lock:
            if run_id in self._held:
                return
            held = self._hold(run, session, keys, model)
            held.busy = False
            held.ended = run.stop is not None or run.turns[-1].ended > self._began or (
                (last.policy_id, last.policy_version) != (model.policy.id, model.policy.version)
            )  # fmt: skip
            for turns, key in enumerate(keys[run.inherited :], run.inherited + 1):
                self._by_key.setdefault((session, key), []).append((held, turns))

    def _place(
        self, request: ModelRequest, keys: Sequence[str], session: ClientSession, model: ServedModel
    ) -> tuple[_Held, tuple[ClientMessage, ...]]:
        """The conversation that the request continues or begins, marked as busy, and its new messages.

        `keys` are those of the request.
        """
        with self._lock:
            for length in range(len(keys) - 1, 0, -1):
                known = self._by_key.get((session, keys[length - 1]), ())
                found = [entry for entry in known if _reads(model, entry[0].model)]
                found = [entry for entry in found if entry[0].model is model] or found
                if found and request.messages[length - 1].role is Role.ASSISTANT:
                    if len(_samples(found)) > 1:
                        names = tuple(sorted(held.run.id for held, _ in found))
                        return self._begin(request, session, model, parents=names), request.messages
                    held, turns = found[0]
                    if not held.busy and turns == len(held.run.turns):
                        return self._continued(held, turns, model), request.messages[length:]
                    if rewritten := self._rewritten(request, model):
                        return rewritten, request.messages
                    return self._continued(held, turns, model), request.messages[length:]
            begun = self._rewritten(request, model) or self._begin(request, session, model)
            return begun, request.messages

    def _rewritten(self, request: ModelRequest, model: ServedModel) -> _Held | None:
        """The agent's conversation whose history the request wrote anew, marked as busy, or None.

        An agent that leaves out a refused answer, or shortens what it read, still makes one run: the request
        begins a token row of it. Without tokens there are no rows.
        """
        if self._episode is None or request.prompt_ids:
            return None
        opening = _rendered(request.messages[:2], request.tools, model.profile, opening=True)[:1]
        for held in sorted(self._held.values(), key=lambda held: held.touched, reverse=True):
            turns = held.run.turns
            if not turns or held.busy or held.ended or held.model is not model:
                continue
            if turns[-1].completion.tokens and turns[0].messages[:1] == opening:
                held.busy = True
                return held
        return None

    def _continued(self, held: _Held, turns: int, model: ServedModel) -> _Held:
        """The conversation itself, or a fork of it where it has gone on or has ended."""
        if turns == len(held.run.turns) and not held.busy and not held.ended and held.model is model:
            held.busy = True
            return held
        parent = held.run
        fork = parent.model_copy(
            update={
                "id": new_run_id(), "turns": parent.turns[:turns], "parent": parent.id, "parent_step": turns,
                "policy": model.name,
                "started": time.time(), "stop": None, "ended": None, "answer": None, "verdict": None,
            }
        )  # fmt: skip
        return self._hold(fork, held.session, held.keys[:turns], model)

    def _begin(
        self, request: ModelRequest, session: ClientSession, model: ServedModel, parents: Sequence[str] = ()
    ) -> _Held:
        ambiguous = bool(parents)
        first = next((m.text for m in request.messages if m.role is Role.USER), "")
        tools = [function_schema(tool) for tool in request.tools]
        opening = content_hash([[m.key for m in request.messages], tools])
        tools_hash = (AMBIGUOUS_TOOLS if ambiguous else CLIENT_TOOLS) + content_hash(tools)
        if request.prompt_ids:
            opening, tools_hash = content_hash(request.prompt_ids), RAW_PROMPT + content_hash(tools)
        if self._episode is not None:
            base = self._episode.run
            id = new_run_id() if base.id in self._held else base.id
            run = base.model_copy(update={"id": id, "tools_hash": tools_hash})
            return self._hold(run, session, [], model)
        task = Task(
            key=f"{_TASK_PREFIX}{opening.removeprefix('sha256:')[:16]}",
            prompt=first if first.strip() else "(no message of a user)",
            tools=(),
            provenance=Provenance(
                source="serve",
                generator=GENERATOR,
                original={"tools": list(tools)},
            ),
        )
        run = Trajectory(
            id=new_run_id(),
            task=task,
            runtime_version=__version__,
            profile=model.profile.name,
            profile_hash=model.profile.hash,
            template_hash=model.policy.template_hash,
            tools_hash=tools_hash,
            policy=model.name,
            started=time.time(),
        )
        return self._hold(run, session, [], model)

    def _hold(self, run: Trajectory, session: ClientSession, keys: list[str], model: ServedModel) -> _Held:
        self._owners += 1
        held = _Held(run=run, model=model, session=session, owner=self._owners, keys=list(keys), busy=True)
        self._held[run.id] = held
        if (surplus := len(self._held) - MOST_HELD) > 0:
            idle = (other for other in self._held.values() if not (other.busy or self._is_sought(other)))
            for other in list(islice(idle, surplus)):
                self._forget(other)
        return held

    def _forget(self, held: _Held) -> None:
        self._held.pop(held.run.id, None)
        for key in held.keys:
            left = [entry for entry in self._by_key.get((held.session, key), ()) if entry[0] is not held]
            if left:
                self._by_key[held.session, key] = left
            else:
                self._by_key.pop((held.session, key), None)
        self._end(held)
        if isinstance(held.model.policy, LocalPolicy):
            held.model.policy.release(held.owner)

    def _sample(
        self, held: _Held, new: tuple[ClientMessage, ...], request: ModelRequest, key: str,
        on_text: OnText | None,
    ) -> ModelAnswer:  # fmt: skip
        """`key` is the conversation's up to the request's last message."""
        started, run, model = time.time(), held.run, held.model
        conversation, messages = _conversation(held, new, request)
        before = tuple(conversation.tokens)
        with self._episode.asking(conversation) if self._episode else nullcontext():
            completion, top = self._complete(held, conversation, request, on_text)
        if model.upstream:
            parsed = upstream.parsed(completion, request.tools)
            calls = upstream.calls(completion) or tuple(map(_call, parsed.calls))
        else:
            parsed = _parsed(completion, request, model.profile)
            calls = tuple(map(_call, parsed.calls))
        turn = Turn(
            index=len(run.turns), messages=messages, completion=completion, thought=parsed.thought,
            calls=parsed.calls, parser=model.profile.dialect, repairs=parsed.repairs,
            started=started, ended=time.time(),
        )  # fmt: skip
        tokens = completion.tokens
        if tokens is not None and tokens.row != conversation.row:
            before = ()  # history was rewritten: a new row
        prompt_ids = (*before, *tokens.context_ids) if tokens else ()
        answer = ModelAnswer(
            run=run.id,
            text=parsed.thought if calls else split_at_stop(completion)[0],
            calls=calls,
            completion=completion,
            prompt_ids=prompt_ids,
            prompt_tokens=len(prompt_ids) if tokens else _prompt_size(conversation, completion, model.policy),
            sampled_tokens=len(tokens.sampled_ids) if tokens else _size(completion, model.policy),
            previous_ended=run.turns[-1].ended if run.turns else None,
            top=top,
        )
        return replace(answer, run=self._record(held, turn, answer, key))

    def _record(self, held: _Held, turn: Turn, answer: ModelAnswer, key: str) -> str:
        """Log the turn, and continue the conversation after it. Returns the run's id: that of a fork, if
        another process has ended the run, as `nano-coder feedback` does."""
        run, store = held.run, held.model.store
        answered = content_hash([key, answer.message.key])
        if held.session.run:
            self._go_on(held, turn, answer, answered)
            return held.session.run
        if not run.own_turns:
            store.begin(run)
        asked = ClientRequest(held.session.name, held.client, answered, held.session.owner)
        try:
            store.append_turn(run.id, turn, None if self._episode else asked)
        except LogError:
            if self._episode or store.get(run.id).stop is None:
                raise
            with self._lock:
                held.ended = True
                fork = self._continued(held, len(run.turns), held.model)
            fork.client = held.client
            try:
                return self._record(fork, turn, answer, key)
            finally:
                with self._lock:
                    fork.busy = False
        self._go_on(held, turn, answer, answered)
        return run.id

    def _go_on(self, held: _Held, turn: Turn, answer: ModelAnswer, answered: str) -> None:
        """Continue the conversation after a turn; `answered` is its hash then."""
        run = held.run
        with self._lock:
            if self._episode is not None:
                self._episode.overflowed = False
                self._episode.tokens += answer.sampled_tokens
                if self._episode.tokens >= run.task.limits.max_tokens:
                    self._episode.reach(StopReason.MAX_TOKENS)
            held.run = run.model_copy(update={"turns": (*run.turns, turn)})
            held.keys.append(answered)
            self._by_key.setdefault((held.session, answered), []).append((held, len(held.keys)))
            self._held.move_to_end(run.id)

    def _complete(
        self, held: _Held, conversation: Conversation, request: ModelRequest, on_text: OnText | None
    ) -> tuple[Completion, tuple[Likeliest, ...]]:
        """The completion, and the likeliest tokens of each of its places if the request asks for them."""
        model, policy = held.model, held.model.policy
        # an agent's answer; not in a rollout, which samples to the end
        conversation.ends_repetition = bool(request.tools) and self._episode is None
        if model.upstream and self._episode is None:
            relay = upstream.Relay(on_text or _read, may_call=bool(request.tools))
            completion = model.upstream.answer(
                conversation, request.sampling, more=request.more, session=held.session.label, on_answer=relay
            )
            return completion, ()
        if on_text and request.tools and not model.upstream:
            on_text = _besides_calls(on_text, request, model.profile)
        if not isinstance(policy, LocalPolicy):
            completion = policy.complete(conversation, request.sampling)
            if on_text:
                tokens = completion.tokens
                sampled = (tokens.sampled_ids, tokens.logprobs) if tokens else ()
                on_text(TextDelta(split_at_stop(completion)[0], *sampled))
            return completion, ()
        stream = TextStream(policy.decode, policy.engine.eos_ids, request.sampling.stop, on_text or _read)
        slot = self._episode.slot if self._episode else None
        top, sampling, choice = request.top_logprobs, request.sampling, request.choice
        with policy.lent(slot):
            if request.prompt_ids:
                completion = policy.complete_ids(
                    request.prompt_ids, sampling, on_token=stream.take, top_logprobs=top, choice=choice
                )
            else:
                completion = policy.complete(
                    conversation, sampling, owner=held.owner, on_token=stream.take, top_logprobs=top,
                    choice=choice,
                )  # fmt: skip
        stream.finish()
        return completion, tuple(stream.top)

    def rendered_ids(self, request: ModelRequest, policy: LocalPolicy, contexts: int = 1) -> tuple[int, ...]:
        """Ids of a conversation that begins with these messages, and of the answer's beginning. Raises
        ContextFull for more than so many contexts."""
        conversation = Conversation(started=time.time())
        for message in _rendered(request.messages, request.tools, self.model.profile, opening=True):
            conversation.append(message)
        said = [*(m.content for m in conversation.messages), request.prefill]
        policy.refuse_long(said, contexts * policy.context_limit)
        return (*policy.template.delta(conversation), *policy.template.encoder.text(request.prefill))

    def log_scored(self, request: ModelRequest, session: ClientSession, model: ServedModel) -> None:
        """Log a prompt that was scored: a run without turns."""
        with self._lock:
            held = self._begin(request, session, model)
            self._forget(held)
        ids = {"scored_ids": list(request.prompt_ids)}
        provenance = held.run.task.provenance.model_copy(update={"original": ids})
        task = held.run.task.model_copy(update={"provenance": provenance})
        model.store.begin(held.run.model_copy(update={"task": task}))
        model.store.finish(held.run.id, stop=StopReason.FINISHED, answer="", ended=time.time())

    # ------------------------------------------------------------------------------------ sessions

    def runs(self, session: str, owner: str | None = None) -> list[str]:
        """Ids of the runs of a session, oldest first, also of an earlier server; those of all owners where
        `owner` is None. Raises UnknownSession."""
        if not (found := self.model.store.session_runs(session, owner)):
            raise UnknownSession(session)
        return found

    def reward(
        self, session: str, reward: float, components: Mapping[str, float] | None = None, *,
        replace: bool = False, owner: str | None = None,
    ) -> list[str]:  # fmt: skip
        """End the runs of a session as `runs` finds them, and give this reward to those that have none.
        Returns their ids.

        Raises UnknownSession, and UsageError where each has a verdict and `replace` does not say otherwise.
        """
        runs = self.runs(session, owner)
        with self._lock:
            for held in self._held.values():
                if held.session.name == session and owner in (None, held.session.owner):
                    self._end(held)
        return give_reward(self.model.store, runs, reward, components, replace=replace)

    def end_episode(
        self, snapshot: str, diff: str, stop: StopReason, detail: str | None
    ) -> Trajectory | None:
        """End the conversations of the episode, once what is being sampled is logged.

        Returns the longest, which left the workspace `snapshot`; None if the agent had no conversation.
        """
        with self._lock:
            self._lock.wait_for(lambda: not any(held.busy for held in self._held.values()), _PATIENCE_SECONDS)
            found = sorted(self._held.values(), key=lambda held: -len(held.run.own_turns))
            found = [held for held in found if held.run.own_turns]
            for other in found[1:]:
                self._end(other)
            if not found:
                return None
            held = found[0]
            held.ended = True
        turns, ended = held.run.turns, time.time()
        answer = turns[-1].completion.text
        held.model.store.finish(
            held.run.id,
            stop=stop,
            stop_detail=detail,
            answer=answer,
            diff=diff,
            ended=ended,
            snapshot=snapshot,
        )
        last = turns[-1].model_copy(update={"snapshot": snapshot})
        return held.run.model_copy(
            update={
                "turns": (*turns[:-1], last), "stop": stop, "stop_detail": detail, "answer": answer,
                "diff": diff, "ended": ended,
            }
        )  # fmt: skip

    def unused(self, policies: Sequence[LocalPolicy], kept: Collection[Policy] = ()) -> list[LocalPolicy]:
        """Those of the policies that answer nothing any more, without `kept`."""
        with self._lock:
            busy = [held.model.policy for held in self._held.values() if held.busy]
        busy += [self.model.policy, *kept]
        return [policy for policy in policies if not any(policy is other for other in busy)]

    def leave(self, policy: LocalPolicy) -> None:
        """End the conversations of a policy that is served no more, and hold its weights no longer; a later
        request forks them."""
        with self._lock:
            for held in list(self._held.values()):
                if held.model.policy is policy and not held.busy:
                    self._end(held)
                    self._forget(held)

    def end_idle(self, seconds: float) -> None:
        """End the runs that no request has continued for so long; a later request forks them."""
        now = time.monotonic()
        with self._lock:
            for held in list(self._held.values()):
                if not held.busy and now - held.touched > seconds:
                    self._end(held)

    def end_all(self) -> None:
        with self._lock:
            for held in self._held.values():
                self._end(held)

    def _end(self, held: _Held) -> None:
        if held.ended or not held.run.own_turns:
            return
        held.ended = True
        if held.session.run:
            return
        last = held.run.turns[-1]
        with suppress(LogError):  # another process was first
            held.model.store.finish(
                held.run.id, stop=StopReason.FINISHED, answer=last.completion.text, ended=last.ended
            )


def end_interrupted(store: LogStore, idle_seconds: float) -> int:
    """End the runs that a killed server left open. Returns their number.

    A run that went on within `idle_seconds` may be that of another server on the same log.
    """
    ended = 0
    for run in store.left_open(_TASK_PREFIX, time.time() - idle_seconds):
        with suppress(LogError):  # another server was first
            end_conversation(store, store.get(run))
            ended += 1
    return ended


def _reads(model: ServedModel, other: ServedModel) -> bool:
    """Whether a model reads the tokens that another was shown: same template and profile."""
    mine, theirs = model.policy.template_hash, other.policy.template_hash
    return model is other or (mine == theirs and model.profile.hash == other.profile.hash)


def _parsed(completion: Completion, request: ModelRequest, profile: InterfaceProfile) -> Parsed:
    tools, prefill = request.tools, request.prefill
    if not tools:
        return Parsed(thought=completion.text)
    parsed = DIALECTS.find(profile.dialect).parse(prefill + completion.text, tools)
    known = {tool.name for tool in tools}
    if parsed.error or any(call.name not in known for call in parsed.calls):
        return Parsed(thought=completion.text)  # prose, or a call of a tool that was not offered
    if prefill:
        rest = parsed.thought.removeprefix(prefill) if parsed.thought.startswith(prefill) else ""
        return replace(parsed, thought=rest)
    return parsed


def _conversation(
    held: _Held, new: tuple[ClientMessage, ...], request: ModelRequest
) -> tuple[Conversation, tuple[Message, ...]]:
    """The run's conversation with its new messages, and these."""
    run, model = held.run, held.model
    anew = bool(run.turns) and len(new) == len(request.messages)
    if model.upstream:
        messages = upstream.messages(new, run.turns[-1].completion.api if run.turns else None)
    else:
        tools = () if request.prompt_ids else request.tools
        messages = _rendered(new, tools, model.profile, opening=anew or not run.turns)
    conversation = Conversation(tools=request.tools if model.upstream else (), started=run.started)
    conversation.run = held.session.run or None
    for turn in run.turns:
        _read_on(conversation, turn.messages, anew=run.restates(turn))
        conversation.record(turn.completion)
    _read_on(conversation, messages, anew=anew)
    return conversation, messages


def _read_on(conversation: Conversation, messages: Sequence[Message], *, anew: bool) -> None:
    """Append the messages, or begin a row with them."""
    if anew:
        conversation.begin_row(messages)
    for message in () if anew else messages:
        conversation.append(message)


def _rendered(
    messages: Sequence[ClientMessage], tools: Sequence[ToolSpec], profile: InterfaceProfile, *, opening: bool
) -> tuple[Message, ...]:
    """The messages as the policy reads them: calls in its dialect, tools in the system message."""
    shown = [Message(role=m.role, content=_content(m, tools, profile)) for m in messages]
    if opening and tools:
        system = system_text(describing(profile), tools)
        if shown and shown[0].role is Role.SYSTEM:
            system = f"{system}\n\n{shown.pop(0).content}"
        shown.insert(0, Message(role=Role.SYSTEM, content=system))
    return tuple(shown)


def _content(message: ClientMessage, tools: Sequence[ToolSpec], profile: InterfaceProfile) -> str:
    if not message.calls:
        return message.text
    calls = [ToolCall(name=call.name, arguments=call.values) for call in message.calls]
    try:
        return DIALECTS.find(profile.dialect).render(message.text, calls, tools)
    except ValueError:  # what this dialect cannot write
        return "\n".join([message.text, *(f"{call.name}({call.arguments})" for call in message.calls)])


def _samples(found: Sequence[tuple[_Held, int]]) -> set[object]:
    """The different ways in which a conversation was sampled; equal tokens are one."""
    return {
        tuple(
            turn.completion.tokens.sampled_ids if turn.completion.tokens else turn.completion.text
            for turn in held.run.turns[:turns]
        )
        for held, turns in found
    }


def _besides_calls(on_text: OnText, request: ModelRequest, profile: InterfaceProfile) -> OnText:
    """`on_text` for what is no call: text that may become one is held back."""
    parser = StreamParser(DIALECTS.find(profile.dialect), request.tools)
    parser.feed(request.prefill)
    return lambda delta: on_text(delta._replace(text=parser.feed(delta.text).thought))


def _prompt_size(conversation: Conversation, completion: Completion, policy: Policy) -> int:
    if completion.api:
        return completion.api.usage.prompt
    return sum(policy.count(m.content) for m in conversation.messages)


def _size(completion: Completion, policy: Policy) -> int:
    return completion.api.usage.completion if completion.api else policy.count(completion.text)


def _is_unredacted(run: Trajectory) -> bool:
    """Whether nothing of what the model read and wrote was hidden in the log."""
    said = [m.content for turn in run.turns for m in turn.messages]
    hidden = any(MARKER.search(text) for text in (*said, *(turn.completion.text for turn in run.turns)))
    return not (hidden or run.is_redacted)


def _read(delta: TextDelta) -> bool:
    return True


def _call(call: ToolCall) -> ClientCall:
    return ClientCall(
        id=f"call_{uuid.uuid4().hex[:24]}",
        name=call.name,
        arguments=json.dumps(call.arguments, ensure_ascii=False),
    )
