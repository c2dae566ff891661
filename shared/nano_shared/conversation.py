"""A conversation: append-only messages, and the exact token row they became."""

from __future__ import annotations

from nano_shared.types import Completion, Message, Role, TurnTokens


class Conversation:
    """Append-only. Messages before `rendered` are already in `tokens`; a policy renders only the rest.

    `tokens` is everything the model has read or sampled in the current row, in order. Nothing in it is
    ever decoded and encoded again.
    """

    def __init__(self, messages: tuple[Message, ...] = ()) -> None:
        self._messages: list[Message] = list(messages)
        self.tokens: list[int] = []
        self.rendered = 0
        self.row = 0
        self.waited = 0.0
        """seconds that its completions waited for other conversations of a batch"""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages that no call has rendered yet."""
        return tuple(self._messages[self.rendered :])

    @property
    def ends_sampled(self) -> bool:
        """Whether the row ends in sampled tokens, so that the next delta must close that turn."""
        return self.rendered > 0 and self._messages[self.rendered - 1].role is Role.ASSISTANT

    def append(self, message: Message) -> None:
        self._messages.append(message)

    def record(self, completion: Completion) -> None:
        """Append the completion and its token delta. A text-only completion leaves the tokens empty."""
        if completion.tokens is not None:
            self._extend(completion.tokens)
        self._messages.append(Message(role=Role.ASSISTANT, content=completion.text))
        self.rendered = len(self._messages)

    def _extend(self, tokens: TurnTokens) -> None:
        if tokens.row != self.row:
            self.tokens = []
            self.row = tokens.row
        self.tokens.extend(tokens.context_ids)
        self.tokens.extend(tokens.sampled_ids)
