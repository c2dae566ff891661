"""Conversations to imitate, in OpenAI's format: `{"messages": [{"role", "content"}, ...]}` a line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nano_rl.exchange.jsonl import read_rows, validated
from nano_rl.exchange.refusal import Refusal, Refused
from nano_rl.imitation.rows import Reader
from nano_rl.sample import TrainSample
from nano_shared.errors import PolicyError, UsageError
from nano_shared.types import Message, Role


class ChatMessage(BaseModel):
    """A message of the format, as far as a template of ours writes it: calls stand in its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    content: str
    weight: Literal[0, 1] | None = None
    """of an assistant message, 1 where it is left out; 0 shows it without training it"""

    @model_validator(mode="after")
    def _of_the_assistant(self) -> ChatMessage:
        if self.weight is not None and self.role is not Role.ASSISTANT:
            raise ValueError("only assistant messages have a weight")
        return self

    @property
    def trained(self) -> bool:
        return self.role is Role.ASSISTANT and self.weight != 0


class Chat(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: tuple[ChatMessage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _teaches(self) -> Chat:
        if not any(message.trained for message in self.messages):
            raise ValueError("no assistant message is left to train on")
        return self


def read_messages(path: Path, reader: Reader) -> list[TrainSample]:
    """The conversations of a file as rows of one policy; every assistant message of weight 1 is trained.

    Raises UsageError with line and field of the first bad row, and for a file without any.
    """
    samples = []
    for where, row in read_rows(path):
        try:
            if isinstance(row, Refusal):
                raise Refused(row.field, row.why)
            chat = validated(Chat, row)
            messages = [Message(role=m.role, content=m.content) for m in chat.messages]
            samples.append(reader.messages(where, messages, [m.trained for m in chat.messages]))
        except (Refused, PolicyError) as problem:
            raise UsageError(f"{where}: {problem}") from None
    if not samples:
        raise UsageError(f'{path} holds no conversation; each line is {{"messages": [...]}}')
    return samples
