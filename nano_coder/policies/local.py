"""The local policy: completes with weights in this process, and logs every token exactly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nano_coder.chat_template import ChatTemplate
from nano_coder.lockstep import Lockstep, Seat
from nano_shared import Completion, ContextFull, Conversation, Finish, PolicyError, Sampling, TurnTokens

if TYPE_CHECKING:
    from nano_coder.engine import Engine, Request, Sampled


class LocalPolicy:
    """A Policy over an Engine. Thread-safe.

    A thread that holds a seat (`agent`) is batched turn by turn with all other seats: the engine runs when
    every seated agent waits for a completion, so that what is in a batch depends on the agents alone and
    never on the clock, and seeds reproduce a rollout bit for bit. A thread without a seat is served at once
    and alone.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        *,
        id: str,
        version: int = 0,
        max_batch: int | None = None,
    ) -> None:
        self.engine = engine
        self.template = template
        self.id = id
        self.version = version
        self._engine_lock = threading.Lock()
        self._lockstep: Lockstep[Request, Sampled] = Lockstep(self._generate, max_batch=max_batch)

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
        return self._lockstep.seat(index)

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """Sample the next turn. Does not modify the conversation.

        Raises ContextFull before sampling if no token would fit, and PolicyError if the template or the
        engine fails.
        """
        from nano_coder.engine import Request

        delta = self.template.delta(conversation)
        row = (*conversation.tokens, *delta)
        room = self.context_limit - len(row)
        if room < 1:
            raise ContextFull(
                f"the row has {len(row)} tokens with the new messages, of the {self.context_limit} that"
                f" {self.id} reads; shorten the task or end the run"
            )
        fitting = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})
        sampled = self._lockstep.call(Request(row, fitting, sampling.seed))
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
        return len(self.template.encoder.text(text))

    def _text(self, sampled: Sampled) -> str:
        ids = sampled.ids[:-1] if sampled.finish is Finish.STOP else sampled.ids
        return self.template.encoder.decode(ids)

    def _generate(self, requests: list[Request]) -> list[Sampled]:
        with self._engine_lock:
            try:
                return self.engine.generate(requests)
            except (RuntimeError, ValueError, IndexError, TypeError, MemoryError) as error:
                raise PolicyError(
                    f"the engine of {self.id} failed on a batch of {len(requests)} rows, the longest of"
                    f" {max(len(r.ids) for r in requests)} tokens: {error}"
                ) from error
