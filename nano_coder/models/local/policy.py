"""The local policy: completes with weights in this process; completions carry exact token ids and
log-probs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.models.local.scheduler import AgentSlot, Lockstep, Scheduler, SchedulerKind, StepUntilDone
from nano_coder.models.repetition import Repetition
from nano_shared.errors import ContextFull
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Sampling, TurnTokens

if TYPE_CHECKING:
    from nano_coder.models.local.constraint import Grammars
    from nano_coder.models.local.engine import Engine, TokenScore
    from nano_coder.models.local.sampler import OnToken, Sampled


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
        scheduler: SchedulerKind | None = None,
    ) -> None:
        """`scheduler` None: free on a GPU, whose results no seed reproduces bit for bit, else lockstep."""
        self.engine = engine
        self.template = template
        self.id = id
        self.version = version
        self._scoring = threading.Lock()
        kind = scheduler or ("lockstep" if engine.device.type == "cpu" else "free")
        self._scheduler = Lockstep(engine, id) if kind == "lockstep" else Scheduler(engine, id)

    @property
    def context_limit(self) -> int:
        return self.engine.context_limit

    @property
    def rows_together(self) -> int:
        """Rows that are decoded together at most."""
        return self.engine.max_batch

    @property
    def vocab_size(self) -> int:
        config: Any = self.engine.model.config
        return int(config.get_text_config().vocab_size)

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
        top_logprobs: int = 0,
        choice: int = 0,
    ) -> Completion:
        """Sample the next turn. Does not modify the conversation.

        `owner` is the conversation for which KV is kept where the thread holds no slot; `on_token` gets each
        token as it is sampled, with the `top_logprobs` likeliest of its place, and ends the turn by returning
        False. `choice`, its number in the client's request: rows after the first leave room for others.
        Raises ContextFull before sampling if no token would fit, PolicyError if the template or the engine
        fails, and UsageError for a grammar that cannot be compiled.
        """
        self.refuse_long([m.content for m in conversation.messages[conversation.rendered :]])
        number, delta = self.template.next_row(conversation)
        row = (*conversation.tokens, *delta) if number == conversation.row else delta
        began = time.monotonic()
        repetition = Repetition() if conversation.ends_repetition else None
        sampled = self._generate(row, sampling, owner, on_token, top_logprobs, choice, repetition)
        conversation.waited += time.monotonic() - began - sampled.seconds
        return self._completion(sampled, number, delta, sampling)

    def complete_ids(
        self, ids: tuple[int, ...], sampling: Sampling, *, on_token: OnToken | None = None,
        top_logprobs: int = 0, choice: int = 0,
    ) -> Completion:  # fmt: skip
        """Sample a continuation of these ids; no template is applied. Raises as `complete`."""
        sampled = self._generate(ids, sampling, None, on_token, top_logprobs, choice)
        return self._completion(sampled, 0, ids, sampling)

    def score(
        self, ids: Sequence[int], top: int, *, first: int = 1, temperature: float = 1.0
    ) -> list[TokenScore]:
        """Log-probs of `ids[first:]`, with the `top` likeliest tokens of each place. Raises ContextFull."""
        if len(ids) > self.context_limit:
            raise ContextFull(
                f"{len(ids)} tokens are more than the {self.context_limit} that {self.id} reads"
            )
        with self._scoring:  # one at a time: the logits of a chunk take hundreds of MB
            return self.engine.score_tokens(ids, temperature, first=first, top=top)

    @cached_property
    def _grammars(self) -> Grammars:
        from nano_coder.models.local.constraint import Grammars

        return Grammars(self.template.encoder.serialised, sorted(self.engine.eos_ids), self.vocab_size)

    def _generate(
        self, row: tuple[int, ...], sampling: Sampling, owner: int | None, on_token: OnToken | None, top: int,
        choice: int, repetition: Repetition | None = None,
    ) -> Sampled:  # fmt: skip
        from nano_coder.models.local.sampler import GenerationRequest

        fitting = self.fitting(row, sampling)
        constraint = self._grammars.constraint(sampling.grammar) if sampling.grammar is not None else None
        request = GenerationRequest(
            row, fitting, sampling.seed, owner, on_token, constraint, top, choice, repetition
        )
        sampled = self._scheduler.call(request)
        if constraint is not None:
            constraint.check()
        return sampled

    def fitting(self, row: Sequence[int], sampling: Sampling) -> Sampling:
        """The sampling of what may follow a row. Raises ContextFull if no token would fit."""
        room = self.context_limit - len(row)
        if room < 1:
            raise ContextFull(
                f"the row has {len(row)} tokens with the new messages, of the {self.context_limit} that"
                f" {self.id} reads ({self.engine.limited_by}); shorten the task or end the run"
            )
        return sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})

    def _completion(
        self, sampled: Sampled, number: int, delta: tuple[int, ...], sampling: Sampling
    ) -> Completion:
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
        """The calling thread uses this slot, which another thread holds; None: no slot."""
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

    def rest(self) -> None:
        """Free the engine's memory if it is idle."""
        self._scheduler.rest()

    def release(self, owner: int) -> None:
        """Release the KV that is retained for this conversation."""
        self._scheduler.release(owner)

    def check_grammar(self, grammar: str) -> None:
        """Raises UsageError for a grammar that cannot be compiled, and ConfigError without llguidance."""
        self._grammars.constraint(grammar)

    def refuse_long(self, texts: Sequence[str], most: int | None = None) -> None:
        """Raises ContextFull for texts of more than `most` tokens (None: the context), before they are
        rendered and encoded; not for each that is too long."""
        most = most or self.context_limit
        if self.template.encoder.surely_more(texts, most):
            size = sum(map(len, texts))
            raise ContextFull(
                f"{size} characters are more than the {most} tokens that {self.id} reads; shorten the task or"
                " end the run"
            )

    def count(self, text: str) -> int:
        """Number of tokens in a plain text."""
        return self.template.count(text)

    def next_row(self, conversation: Conversation) -> tuple[int, tuple[int, ...]]:
        """The row of the next turn, and the ids that the template appends before it is sampled."""
        return self.template.next_row(conversation)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return self.template.encoder.decode(ids)

    def _text(self, sampled: Sampled) -> str:
        ids = sampled.ids[:-1] if sampled.ids[-1] in self.engine.eos_ids else sampled.ids
        return self.template.encoder.decode(ids)
