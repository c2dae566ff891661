"""The local policy: completes with weights in this process, and logs every token exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.models.local.scheduler import Lead, Schedule, Scheduler, Seat
from nano_shared import Completion, ContextFull, Conversation, Sampling, TurnTokens

if TYPE_CHECKING:
    from nano_coder.models.local.engine import Engine, Sampled
from nano_coder.models.local.scheduler import Call


class Lockstep(Scheduler):
    """Rounds of all seated agents, in the order of their seats. Thread-safe.

    A round begins when the last one is decoded and every agent waits for a completion, or has left; its
    rows then join and leave the batch as their tokens decide. An agent is answered when its row ends and
    runs its tools at once; what it asks next waits for the next round. Where more agents are seated than run
    at once, the round is of those that come first; the seat of one that left falls to the next.

    Threads without a seat are served between rounds, each alone.
    """

    def _joinable(self) -> list[Call]:
        if self._live:
            return []
        for call in self._waiting:
            if call.seat is None:
                return [call]
        running = sorted(self._seats)[: self._at_once]
        calls = {call.seat: call for call in self._waiting}
        if any(seat not in calls for seat in running):
            return []
        return [calls[seat] for seat in running]


class LocalPolicy:
    """A Policy over an Engine. Thread-safe.

    A thread that holds a seat (`agent`) is batched with all other seats. Under the lockstep scheduler what is
    in a batch depends on what the agents say and never on the clock, and seeds reproduce a rollout bit for
    bit; under the free one a request is decoded when it comes, beside whatever is there. What a row draws is
    the same under both, up to rounding.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        *,
        id: str,
        version: int = 0,
        scheduler: Schedule = "lockstep",
    ) -> None:
        self.engine = engine
        self.template = template
        self.id = id
        self.version = version
        self._scheduler = Lockstep(engine, id) if scheduler == "lockstep" else Scheduler(engine, id)

    @property
    def context_limit(self) -> int:
        return self.engine.context_limit

    @property
    def template_hash(self) -> str:
        return self.template.template_hash

    def agent(self, index: int) -> Seat:
        """A seat, taken by this call and bound to the thread that enters it: `with policy.agent(0): ...`.

        Take the seats of a batch before starting its threads; a seat that is taken holds up the others
        until its agent waits too or leaves. Raises UsageError if the index is taken.
        """
        return self._scheduler.seat(index)

    def hosted(self) -> AbstractContextManager[Lead]:
        """Make the calling thread the one that computes, while it waits for agents: `Scheduler.hosted`."""
        return self._scheduler.hosted()

    def agents(self, count: int, at_once: int) -> list[Seat]:
        """Seats for agents that begin in this order, `at_once` of them at a time."""
        return self._scheduler.seats(count, at_once)

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """Sample the next turn. Does not modify the conversation.

        Raises ContextFull before sampling if no token would fit, and PolicyError if the template or the
        engine fails.
        """
        from nano_coder.models.local.engine import Request

        delta = self.template.delta(conversation)
        row = (*conversation.tokens, *delta)
        room = self.context_limit - len(row)
        if room < 1:
            raise ContextFull(
                f"the row has {len(row)} tokens with the new messages, of the {self.context_limit} that"
                f" {self.id} reads; shorten the task or end the run"
            )
        fitting = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})
        began = time.monotonic()
        sampled = self._scheduler.call(Request(row, fitting, sampling.seed))
        conversation.waited += time.monotonic() - began - sampled.seconds
        return Completion(
            text=self._text(sampled),
            finish=sampled.finish,
            tokens=TurnTokens(
                row=conversation.row,
                context_ids=delta,
                sampled_ids=sampled.ids,
                logprobs=sampled.logprobs,
            ),
            sampling=sampling,
            policy_id=self.id,
            policy_version=self.version,
        )

    def count(self, text: str) -> int:
        """Number of tokens in a plain text."""
        return self.template.count(text)

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        """What the template appends before the next turn is sampled."""
        return self.template.delta(conversation)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return self.template.encoder.decode(ids)

    def _text(self, sampled: Sampled) -> str:
        ids = sampled.ids[:-1] if sampled.ids[-1] in self.engine.eos_ids else sampled.ids
        return self.template.encoder.decode(ids)
