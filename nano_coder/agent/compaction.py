"""Compaction: a policy whose context is nearly full writes a summary, and a new row begins with it.

The summary is a turn like any other, sampled at the end of the old row. The new row begins with the system
message, the task with the summary, and as many of the last turns as fit. Messages that differ from the logged
observations are stored in `messages` of the turn, so that nothing is recomputed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nano_coder.agent.actions import cut_to
from nano_coder.agent.dialects.dialect import function_schema
from nano_coder.agent.profiles import rendered
from nano_shared.errors import ContextFull
from nano_shared.policy import CompactionFormat, Conversation, Policy
from nano_shared.types import Completion, Message, Role, Turn, Usage

MOST_SUMMARIES = 50
"""of one run"""
_MESSAGE = 16
"""tokens that a chat template writes around a message, at most"""
Messages = Callable[[Turn], list[Message]]
"""what the observations of a turn append to the conversation"""


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """When a row is summarised, and what the next one begins with. Sizes are in tokens, as the policy counts
    them; for a policy without a tokenizer they are estimates."""

    form: CompactionFormat
    policy: Policy
    opening: tuple[Message, ...]
    """system message and task"""
    tools: int
    """size of the tools that the chat template or the server shows"""
    most: int
    """sampled tokens of one completion"""

    @property
    def summary_tokens(self) -> int:
        return min(self.most, self.policy.context_limit // 8)

    @property
    def _reserve(self) -> int:
        """Tokens kept free for the request, the summary, and a history that the template renders again."""
        return self.summary_tokens + self._request_size + self.policy.context_limit // 16

    @property
    def _answer(self) -> int:
        """Smallest number of tokens for an answer."""
        return min(self.most, self.policy.context_limit // 4)

    @cached_property
    def _request(self) -> Message:
        return Message(role=Role.USER, content=self.form.request)

    @cached_property
    def _request_size(self) -> int:
        return self._size([self._request])

    def _opening(self, turns: Sequence[Turn]) -> int:
        """Tokens of the opening, as the first turn counted them."""
        first = turns[0].completion if turns else None
        if first and first.tokens:
            return len(first.tokens.context_ids)
        return (read_tokens(first) if first else 0) or self.tools + self._size(self.opening)

    def _possible(self, turns: Sequence[Turn]) -> bool:
        """True if a row that begins with a summary has room for further turns."""
        begun = self._opening(turns) + self.summary_tokens
        return begun + self._answer + self._reserve <= self.policy.context_limit

    def due(self, conversation: Conversation, turns: Sequence[Turn]) -> bool:
        """Whether the row has to be summarised before its next answer. Raises ContextFull after
        `MOST_SUMMARIES`, and if the row after a summary has no room."""
        room = self._room(conversation, turns)
        if turns and turns[-1].is_summary:
            if not turns[-1].thought.strip():
                raise ContextFull("asked for a summary of its full context, the policy wrote an empty one")
            if room < 1:
                raise ContextFull("task and summary leave no room in the context of the policy")
            return False
        if not conversation.rendered or not self._possible(turns) or room >= self._answer:
            return False
        self.refuse_more(turns)
        return True

    def refuse_more(self, turns: Sequence[Turn]) -> None:
        if sum(turn.is_summary for turn in turns) >= MOST_SUMMARIES:
            raise ContextFull(f"its history was summarised {MOST_SUMMARIES} times, as often as it may be")

    def answer_tokens(self, conversation: Conversation, turns: Sequence[Turn]) -> int:
        """Largest number of tokens of the next answer that leaves room for a summary."""
        return max(1, self._room(conversation, turns)) if self._possible(turns) else self.most

    def asking(self, conversation: Conversation, turns: Sequence[Turn]) -> list[Message]:
        """The messages that ask for a summary: pending messages, truncated to fit, and the request."""
        waiting = conversation.new_messages
        read = self._used(conversation, turns) - self._size(waiting)
        return [*self._cut(waiting, self.policy.context_limit - read - self._reserve), self._request]

    def new_row(self, turns: Sequence[Turn], messages: Messages) -> list[Message]:
        """The messages of the row that follows a summary, the last of `turns`."""
        *opening, task = self.opening
        summary = turns[-1].thought.strip()
        added = rendered(self.form.summary, summary=summary)
        begun = [*opening, task.model_copy(update={"content": task.content + added})]
        size = self._opening(turns) + self.policy.count(added)
        left = self.policy.context_limit - size - self._answer - self._reserve
        return [*begun, *self._kept(turns[:-1], messages, min(left, self.policy.context_limit // 4))]

    def _kept(self, turns: Sequence[Turn], messages: Messages, room: int) -> list[Message]:
        """The last turns of the row that fit; of the last one the observations are cut if they do not."""
        kept: list[Message] = []
        for turn in reversed(turns):
            calls = turn.completion.api.calls if turn.completion.api else ()
            said = Message(role=Role.ASSISTANT, content=turn.completion.text, calls=calls)
            seen = messages(turn)
            left = room - self._size([said, *kept])
            if turn.is_summary or (left < self._size(seen) and (kept or left < 1)):
                break
            kept = [said, *self._cut(seen, left), *kept]
        return kept

    def _cut(self, messages: Sequence[Message], room: int) -> list[Message]:
        """The messages with the longest contents cut until they fit."""
        if self._size(messages) <= room:
            return list(messages)
        each = max(0, room // len(messages) - 2 * _MESSAGE)
        contents = (cut_to(message.content, each, self.policy.count) for message in messages)
        return [m.model_copy(update={"content": c}) for m, c in zip(messages, contents, strict=True)]

    def _room(self, conversation: Conversation, turns: Sequence[Turn]) -> int:
        return self.policy.context_limit - self._used(conversation, turns) - self._reserve

    def _used(self, conversation: Conversation, turns: Sequence[Turn]) -> int:
        """Tokens of the row with its pending messages."""
        waiting = self._size(conversation.new_messages)
        if conversation.tokens:
            return len(conversation.tokens) + waiting
        last = turns[-1].completion if turns and conversation.rendered else None
        if last and last.api and (read := read_tokens(last)):
            return read + last.api.usage.completion + waiting
        more = self._size(conversation.messages) - self._size(self.opening)
        return self._opening(turns) + more

    def _size(self, messages: Iterable[Message]) -> int:
        texts = ((m, (m.content, *(call.arguments for call in m.calls))) for m in messages)
        return sum(
            _MESSAGE + sum(map(self.policy.count, parts)) + sum(image.tokens for image in m.images)
            for m, parts in texts
        )


def read_tokens(completion: Completion) -> int:
    """Prompt tokens as the server counted them; 0 if it did not."""
    usage = completion.api.usage if completion.api else Usage(estimated=True)
    return 0 if usage.estimated else usage.prompt


def compaction_of(
    form: CompactionFormat, policy: Policy, conversation: Conversation, most: int
) -> Compaction:
    shown = json.dumps([function_schema(tool) for tool in conversation.tools]) if conversation.tools else ""
    return Compaction(
        form=form, policy=policy, opening=conversation.messages, tools=policy.count(shown), most=most
    )
