"""The scripted policy: answers with given texts in order, for tests, examples and documentation."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from nano_shared.errors import ContextFull, PolicyError
from nano_shared.files import content_hash
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Finish, Sampling, TurnTokens

EOS_ID = 256
"""end-of-turn id, after the 256 byte ids"""


class ScriptedPolicy:
    """Answers with the texts in order, whatever the conversation. Thread-safe.

    With `tokens=True` it logs byte-level tokens: ids are UTF-8 bytes, a finished turn ends with `EOS_ID`, and
    every log-prob is 0. The context of a turn is the new messages as lines `role: content`.
    """

    version = 0
    template_hash = content_hash("nano scripted: {role}: {content}\n")

    def __init__(
        self,
        texts: Iterable[str],
        *,
        tokens: bool = False,
        context_limit: int = 1_000_000,
        id: str = "scripted",
    ) -> None:
        self.id = id
        self.context_limit = context_limit
        self._texts = tuple(texts)
        self._tokens = tokens
        self._used = 0
        self._lock = threading.Lock()

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The next text. Raises PolicyError after the last text, and ContextFull as any policy does."""
        if not self._tokens:
            return self._completion(self._next(), Finish.STOP, None, sampling)
        context = self.delta(conversation)
        room = self.context_limit - len(conversation.tokens) - len(context)
        if room < 1:
            raise ContextFull(
                f"the row has {self.context_limit - room} tokens with the new messages, of the"
                f" {self.context_limit} that {self.id} reads; shorten the task or end the run"
            )
        sampled = (*self._next().encode(), EOS_ID)[: min(sampling.max_tokens, room)]
        tokens = TurnTokens(
            row=conversation.row, context_ids=context, sampled_ids=sampled, logprobs=(0.0,) * len(sampled)
        )
        finish = Finish.STOP if sampled[-1] == EOS_ID else Finish.LENGTH
        text = bytes(i for i in sampled if i != EOS_ID).decode(errors="replace")
        return self._completion(text, finish, tokens, sampling)

    def _completion(
        self, text: str, finish: Finish, tokens: TurnTokens | None, sampling: Sampling
    ) -> Completion:
        return Completion(
            text=text, finish=finish, tokens=tokens, sampling=sampling, policy_id=self.id,
            policy_version=self.version,
        )  # fmt: skip

    def count(self, text: str) -> int:
        return len(text.encode())

    def _next(self) -> str:
        with self._lock:
            if self._used == len(self._texts):
                raise PolicyError(
                    f"the script of {self.id} has run out after {self._used} texts; give it one text a turn"
                )
            self._used += 1
            return self._texts[self._used - 1]

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        # a turn that was cut by length is closed here, in the context, as chat templates do
        cut = bool(conversation.tokens) and conversation.tokens[-1] != EOS_ID
        lines = "".join(f"{m.role.value}: {m.content}\n" for m in conversation.new_messages)
        return (*((EOS_ID,) if cut else ()), *lines.encode())

    def next_row(self, conversation: Conversation) -> tuple[int, tuple[int, ...]]:
        return conversation.row, self.delta(conversation)
