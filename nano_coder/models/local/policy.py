"""The local policy: completes with weights in this process; completions carry exact token ids and
log-probs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.models.local.scheduler import AgentSlot, Lockstep, Scheduler, SchedulerKind, StepUntilDone
from nano_shared import Completion, ContextFull, Conversation, Sampling, TurnTokens

if TYPE_CHECKING:
    from nano_coder.models.local.engine import Engine
    from nano_coder.models.local.row import OnToken, Sampled


class LocalPolicy:
    """A Policy over an Engine. Thread-safe.

    Threads that hold a slot (`agent`) are batched together. Under the lockstep scheduler the composition of a
    batch depends on the agents' tokens and never on the clock, so seeds reproduce a rollout bit for bit;
    under the free one a request joins the batch at the next step. Up to rounding, rows get the same tokens
    from both.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        *,
        id: str,
        version: int = 0,
        scheduler: SchedulerKind = "lockstep",
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

    def agent(self, index: int) -> AgentSlot:
        """A slot, taken by this call and bound to the thread that enters it: `with policy.agent(0): ...`.

        Take the slots of all agents before starting their threads: a round waits for every slot that is
        taken. Raises UsageError if the index is taken.
        """
        return self._scheduler.slot(index)

    def hosted(self) -> AbstractContextManager[StepUntilDone]:
        """Make the calling thread the only one that steps the engine; see `Scheduler.hosted`."""
        return self._scheduler.hosted()

    def agents(self, count: int, at_once: int) -> list[AgentSlot]:
        """Slots for `count` agents that start in this order, `at_once` of them at a time."""
        return self._scheduler.slots(count, at_once)

    def complete(
        self,
        conversation: Conversation,
        sampling: Sampling,
        *,
        owner: int | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        """Sample the next turn. Does not modify the conversation.

        `owner` is the conversation for which KV is kept where the thread holds no slot; `on_token` gets each
        token as it is sampled, and ends the turn by returning False.
        Raises ContextFull before sampling if no token would fit, and PolicyError if the template or the
        engine fails.
        """
        from nano_coder.models.local.row import GenerationRequest

        number, delta = self.template.next_row(conversation)
        row = (*conversation.tokens, *delta) if number == conversation.row else delta
        room = self.context_limit - len(row)
        if room < 1:
            raise ContextFull(
                f"the row has {len(row)} tokens with the new messages, of the {self.context_limit} that"
                f" {self.id} reads; shorten the task or end the run"
            )
        fitting = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})
        began = time.monotonic()
        sampled = self._scheduler.call(GenerationRequest(row, fitting, sampling.seed, owner, on_token))
        conversation.waited += time.monotonic() - began - sampled.seconds
        return Completion(
            text=self._text(sampled),
            finish=sampled.finish,
            tokens=TurnTokens(
                row=number,
                context_ids=delta,
                sampled_ids=sampled.ids,
                logprobs=sampled.logprobs,
            ),
            sampling=sampling,
            policy_id=self.id,
            policy_version=self.version,
        )

    @contextmanager
    def lent(self, slot: int | None) -> Iterator[None]:
        """The calling thread asks in the place of this slot, which another thread holds; None: of no slot."""
        before = self._scheduler.bound
        self._scheduler.bind(slot)
        try:
            yield
        finally:
            self._scheduler.bind(before)

    @property
    def slot(self) -> int | None:
        """The slot that the calling thread holds."""
        return self._scheduler.bound

    def release(self, owner: int) -> None:
        """Let the KV go that is kept for this conversation."""
        self._scheduler.release(owner)

    def count(self, text: str) -> int:
        """Number of tokens in a plain text."""
        return self.template.count(text)

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        """Ids that the template appends before the next turn is sampled."""
        return self.template.delta(conversation)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return self.template.encoder.decode(ids)

    def _text(self, sampled: Sampled) -> str:
        ids = sampled.ids[:-1] if sampled.ids[-1] in self.engine.eos_ids else sampled.ids
        return self.template.encoder.decode(ids)
