"""The policy that samples, and the interface profile under which a model sees tasks and tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, Protocol, runtime_checkable

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from nano_shared.files import content_hash
from nano_shared.types import Completion, Message, Role, Sampling, ToolSpec, TurnTokens, Value

DecodeIds = Callable[[Sequence[int]], str]
"""token ids -> text, control tokens included"""
Likeliest = tuple[tuple[int, float], ...]
"""the likeliest tokens of a position, likeliest first, with their log-probs"""
Beginning = tuple[tuple[int, float], ...]
"""tokens that an answer has to begin with, with their log-probs"""


class Conversation:
    """Append-only within a row. Messages before `rendered` are already in `tokens`; a policy renders only the
    rest.

    `tokens` is everything that the model has read or sampled in the current row, in order. It is never
    decoded and encoded again.
    """

    def __init__(
        self,
        messages: tuple[Message, ...] = (),
        *,
        tools: tuple[ToolSpec, ...] = (),
        started: float | None = None,
    ) -> None:
        """`tools` are those that the chat template shows, and `started` (unix seconds) is the date that it
        writes; None is today."""
        self._messages: list[Message] = list(messages)
        self.tools = tools
        self.started = started
        self.deadline: float | None = None
        """when the next completion must be there, on the monotonic clock"""
        self.on_text: Callable[[str], None] | None = None
        """gets the text of a completion as it comes, from a policy that streams"""
        self.ends_repetition = False
        """whether a completion that repeats itself is ended"""
        self.get_blob: Callable[[str], bytes] | None = None
        """reads the images of its messages, for a policy that sees"""
        self.stop: Event | None = None
        """set, it cancels the completion that is being sampled"""
        self.tokens: list[int] = []
        self.rendered = 0
        self.row = 0
        self.last_row = 0
        """highest number of a row of the run; that of a sub-agent's is above its parent's"""
        self.row_start = len(messages)
        """number of messages before the first turn that was sampled in the current row"""
        self.run: str | None = None
        """id of the logged run whose turns its completions are; None: no run's"""
        self.waited = 0.0
        """seconds that its completions waited for other conversations of a batch"""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages that no call has rendered yet."""
        return tuple(self._messages[self.rendered :])

    def append(self, message: Message) -> None:
        self._messages.append(message)

    def replace_new(self, messages: Sequence[Message]) -> None:
        """Put these messages in the place of those that no call has rendered yet."""
        self._messages[self.rendered :] = messages

    def begin_row(self, messages: Sequence[Message]) -> None:
        """Rewrite history: a new row, of which no call has rendered anything, begins with these messages."""
        self._messages = list(messages)
        self.tokens = []
        self.rendered = 0
        self.row = self.last_row = self.last_row + 1
        self.row_start = len(self._messages)

    def record(self, completion: Completion) -> None:
        """Append the completion and its token delta. A text-only completion leaves the tokens empty."""
        if completion.tokens is not None:
            self._extend(completion.tokens)
        calls = completion.api.calls if completion.api else ()
        self._messages.append(Message(role=Role.ASSISTANT, content=completion.text, calls=calls))
        self.rendered = len(self._messages)

    def _extend(self, tokens: TurnTokens) -> None:
        if tokens.row != self.row:
            self.tokens = []
            self.row = tokens.row
            self.last_row = max(self.last_row, tokens.row)
        if not self.tokens:
            self.row_start = len(self._messages)
        self.tokens.extend(tokens.context_ids)
        self.tokens.extend(tokens.sampled_ids)


@runtime_checkable
class Policy(Protocol):
    """Answers conversations. Thread-safe: many agents call it at once. Keeps no hidden state but a KV cache.

    `id` names the weights (content hash or endpoint model), `version` counts their optimizer steps,
    `context_limit` is the longest row in tokens, and `template_hash` identifies the chat template.
    """

    @property
    def id(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def context_limit(self) -> int: ...

    @property
    def template_hash(self) -> str: ...

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """Answer the conversation. Renders only `conversation.new_messages`; does not modify it.

        Raises PolicyError when the backend fails and ContextFull when the row would exceed the limit.
        """
        ...

    def count(self, text: str) -> int:
        """Number of tokens in a text; an estimate where the backend has no tokenizer."""
        ...


def sees(policy: Policy) -> bool:
    """Whether a policy reads the images of messages: it says so by an attribute `sees`."""
    return bool(getattr(policy, "sees", False))


class ObservationFormat(Value):
    """How much of a tool's output the model sees: head and tail by tokens, with a marker first."""

    head_tokens: int
    tail_tokens: int


class CompactionFormat(Value):
    """How a policy whose context is nearly full is asked for a summary, and how the next row shows it."""

    request: str
    """the user message that asks"""
    summary: str
    """Jinja template of what follows the task in the first user message of the new row; variable: summary"""


class InterfaceProfile(Value):
    name: str
    dialect: str
    """how actions are written: a name of `nano.dialects`"""
    tools: tuple[ToolSpec, ...]
    """every tool the profile knows; a task may offer fewer"""
    system: str
    """Jinja template of the system message; variables: tools"""
    task: str
    """Jinja template of the first user message; variables: prompt, files, check, instructions, place,
    tried"""
    observation: ObservationFormat
    chat_template: str | None
    """Jinja chat template, or None for the one that the policy's tokenizer carries"""
    compaction: CompactionFormat | None = None
    """None: a run ends where its context is full"""
    places: int = 0
    """rounds in which the program shows places of the project, each in a row of its own, for one edit; 0: the
    policy leads"""
    completion_tokens: int = Field(256, ge=1, exclude=True)
    """usual limit of one completion; no part of the hash, as the policy does not see it"""
    describing: str | None = Field(None, exclude=True)
    """the profile whose system message describes a client's tools; None: this one"""

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # fields that came later are left out where they are not set, so that the hashes of profiles stay
        said: dict[str, Any] = handler(self)
        for name in ("compaction", "places"):
            if not getattr(self, name):
                said.pop(name, None)
        return said

    @property
    def hash(self) -> str:
        return content_hash(self.model_dump(mode="json"))

    @property
    def tools_hash(self) -> str:
        return content_hash([tool.model_dump(mode="json") for tool in self.tools])
