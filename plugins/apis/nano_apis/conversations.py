"""Conversations of clients: found again by their messages, continued as sampled, logged as runs.

A request whose messages begin with those of an earlier one and its answer continues that conversation's
tokens: the answer is never rendered or encoded again. Any other history begins a new row.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from nano_apis.request import ClientMessage, ModelAnswer, ModelRequest, OnText, split_at_stop
from nano_apis.served_models import ServedModel
from nano_coder import __version__
from nano_coder.agent.dialects.dialect import function_schema
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.access import ADMIN_OWNER
from nano_coder.serve.given_reward import give_reward
from nano_shared.errors import LogError
from nano_shared.files import content_hash
from nano_shared.policy import Conversation, Policy
from nano_shared.schema import ClientRequest
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import (
    AMBIGUOUS_TOOLS,
    CLIENT_TOOLS,
    MARKER,
    RAW_PROMPT,
    Provenance,
    Role,
    Share,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

MOST_HELD = 1024
"""conversations that can be continued; the one that was used longest ago is forgotten first"""
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


NAMELESS = ClientSession()


@dataclass(eq=False, slots=True, kw_only=True)
class HeldConversation:
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

    is_rollout = False
    """whether an external agent's run is made here"""
    slot: int | None = None
    """the policy's slot of a rollout"""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        """answers what begins now; requests in flight are answered by the one that they began with"""
        self._lock = threading.Condition()
        """notified when a turn was sampled"""
        self._held: OrderedDict[str, HeldConversation] = OrderedDict()
        self._by_key: dict[tuple[ClientSession, str], list[tuple[HeldConversation, int]]] = {}
        self._sought: list[tuple[ClientSession, frozenset[str]]] = []
        """session and keys of each request that looks for its conversation, which is held meanwhile"""
        self._owners = 0
        self._began = time.time()

    # ---------------------------------------------------------------------------------- answering

    def answer(
        self, request: ModelRequest, session: ClientSession = NAMELESS, on_text: OnText | None = None,
        model: ServedModel | None = None, client: str = "",
    ) -> ModelAnswer:  # fmt: skip
        """Sample the next turn of a conversation, and log it, with the user agent of its client.

        `model` None: by the one that is served now.

        Raises ContextFull for messages that leave no room, and PolicyError if the backend fails; neither is
        logged.
        """
        keys, model = request.keys(), model or self.model
        # the run that a client names has the answers already, where it is open in this log; a client that
        # cannot read the log knows no such id
        open_run = session.run if session.run and model.store.is_open(session.run) else ""
        session = session._replace(run=open_run)
        with self._seeking(session, keys):
            if not session.run:
                self._recall(request, keys, session, model)
            held, new = self._place(request, keys, session, model)
        held.client = client
        try:
            return self._sample(held, new, request, keys[-1], on_text)
        finally:
            with self._lock:
                held.busy = False
                held.touched = time.monotonic()
                if not held.run.own_turns:
                    self._forget(held)
                self._lock.notify_all()

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

    def _is_sought(self, held: HeldConversation) -> bool:
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
        if not missing:
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
    ) -> tuple[HeldConversation, tuple[ClientMessage, ...]]:
        """The conversation that the request continues or begins, marked as busy, and its new messages.

        `keys` are those of the request.
        """
        with self._lock:
            for length in range(len(keys) - 1, 0, -1):
                known = self._by_key.get((session, keys[length - 1]), ())
                found = [entry for entry in known if model.reads(entry[0].model)]
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

    def _rewritten(self, request: ModelRequest, model: ServedModel) -> HeldConversation | None:
        """A conversation whose history the request wrote anew, marked as busy: none of a client's."""
        return None

    def _continued(self, held: HeldConversation, turns: int, model: ServedModel) -> HeldConversation:
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
    ) -> HeldConversation:
        tools = [function_schema(tool) for tool in request.tools]
        kind = RAW_PROMPT if request.prompt_ids else AMBIGUOUS_TOOLS if parents else CLIENT_TOOLS
        run = self._new_run(request, kind + content_hash(tools), model)
        if session.owner not in ("", ADMIN_OWNER) and not self.is_rollout:  # else it is the server's owner's
            user = model.store.user
            # the server, which is another user, must be shown it
            hidden = user is not None and user.share is Share.NEVER
            shared = {"share": Share.TEAM} if hidden else {}
            run = run.model_copy(update={"owner": session.owner, **shared})
        return self._hold(run, session, [], model)

    def _new_run(self, request: ModelRequest, tools_hash: str, model: ServedModel) -> Trajectory:
        first = next((m.text for m in request.messages if m.role is Role.USER), "")
        tools = [function_schema(tool) for tool in request.tools]
        opening = content_hash(request.prompt_ids or [[m.key for m in request.messages], tools])
        task = Task(
            key=f"{_TASK_PREFIX}{opening.removeprefix('sha256:')[:16]}",
            prompt=first if first.strip() else "(no message of a user)",
            tools=(),
            provenance=Provenance(source="serve", generator=GENERATOR, original={"tools": list(tools)}),
        )
        return Trajectory(
            id=new_run_id(), task=task, runtime_version=__version__, profile=model.profile.name,
            profile_hash=model.profile.hash, template_hash=model.policy.template_hash,
            tools_hash=tools_hash, policy=model.name, started=time.time(),
        )  # fmt: skip

    def _hold(
        self, run: Trajectory, session: ClientSession, keys: list[str], model: ServedModel
    ) -> HeldConversation:
        self._owners += 1
        held = HeldConversation(
            run=run, model=model, session=session, owner=self._owners, keys=list(keys), busy=True
        )
        self._held[run.id] = held
        if (surplus := len(self._held) - MOST_HELD) > 0:
            idle = (other for other in self._held.values() if not (other.busy or self._is_sought(other)))
            for other in list(islice(idle, surplus)):
                self._forget(other)
        return held

    def _forget(self, held: HeldConversation) -> None:
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
        self, held: HeldConversation, new: tuple[ClientMessage, ...], request: ModelRequest, key: str,
        on_text: OnText | None,
    ) -> ModelAnswer:  # fmt: skip
        """`key` is the conversation's up to the request's last message."""
        started, run, model = time.time(), held.run, held.model
        conversation, messages = model.conversation(run, new, request)
        conversation.run = held.session.run or None
        # an agent's answer; not in a rollout, which samples to the end
        conversation.ends_repetition = bool(request.tools) and not self.is_rollout
        before = tuple(conversation.tokens)
        with self._asking(conversation):
            completion, top = model.complete(
                conversation, request, on_text, owner=held.owner, slot=self.slot,
                session=None if self.is_rollout else held.session.label,
            )  # fmt: skip
        parsed, calls = model.read(completion, request)
        turn = Turn(
            index=len(run.turns), messages=messages, completion=completion, thought=parsed.thought,
            calls=parsed.calls, parser=model.profile.dialect, repairs=parsed.repairs,
            started=started, ended=time.time(),
        )  # fmt: skip
        prompt_ids: tuple[int, ...] = ()
        if (tokens := completion.tokens) is not None:
            # a rewritten history begins a row
            prompt_ids = (*(before if tokens.row == conversation.row else ()), *tokens.context_ids)
            read, sampled = len(prompt_ids), len(tokens.sampled_ids)
        else:
            read, sampled = model.sizes(conversation, completion)
        answer = ModelAnswer(
            run=run.id, text=parsed.thought if calls else split_at_stop(completion)[0], calls=calls,
            completion=completion, prompt_ids=prompt_ids, prompt_tokens=read, sampled_tokens=sampled, top=top,
        )  # fmt: skip
        return replace(answer, run=self._record(held, turn, answer, key))

    def _asking(self, conversation: Conversation) -> AbstractContextManager[None]:
        """Entered while a request is answered."""
        return nullcontext()

    def _record(self, held: HeldConversation, turn: Turn, answer: ModelAnswer, key: str) -> str:
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
            store.append_turn(run.id, turn, None if self.is_rollout else asked)
        except LogError:
            if self.is_rollout or store.get(run.id).stop is None:
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

    def _go_on(self, held: HeldConversation, turn: Turn, answer: ModelAnswer, answered: str) -> None:
        run = held.run
        with self._lock:
            held.run = run.model_copy(update={"turns": (*run.turns, turn)})
            held.keys.append(answered)
            self._by_key.setdefault((held.session, answered), []).append((held, len(held.keys)))
            self._held.move_to_end(run.id)

    def rendered_ids(self, request: ModelRequest, policy: LocalPolicy, contexts: int = 1) -> tuple[int, ...]:
        """Ids of a conversation that begins with these messages. Raises ContextFull for more than so many
        contexts."""
        conversation = Conversation(started=time.time())
        for message in self.model.rendered(request.messages, request.tools, opening=True):
            conversation.append(message)
        policy.refuse_long([m.content for m in conversation.messages], contexts * policy.context_limit)
        return policy.template.delta(conversation)

    def log_scored(self, request: ModelRequest, session: ClientSession, model: ServedModel) -> None:
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

    def _end(self, held: HeldConversation) -> None:
        if held.ended or not held.run.own_turns:
            return
        held.ended = True
        if not held.session.run:
            with suppress(LogError):  # another process was first
                held.model.store.finish_served(held.run)


def end_interrupted(store: LogStore, idle_seconds: float) -> int:
    """End the runs that a killed server left open. Returns their number.

    A run that went on within `idle_seconds` may be that of another server on the same log.
    """
    ended = 0
    for run in store.left_open(_TASK_PREFIX, time.time() - idle_seconds):
        with suppress(LogError):  # another server was first
            store.finish_served(store.get(run))
            ended += 1
    return ended


def _samples(found: Sequence[tuple[HeldConversation, int]]) -> set[object]:
    """The different ways in which a conversation was sampled; equal tokens are one."""
    return {
        tuple(
            turn.completion.tokens.sampled_ids if turn.completion.tokens else turn.completion.text
            for turn in held.run.turns[:turns]
        )
        for held, turns in found
    }


def _is_unredacted(run: Trajectory) -> bool:
    """Whether nothing of what the model read and wrote was hidden in the log."""
    said = [m.content for turn in run.turns for m in turn.messages]
    hidden = any(MARKER.search(text) for text in (*said, *(turn.completion.text for turn in run.turns)))
    return not (hidden or run.is_redacted)
