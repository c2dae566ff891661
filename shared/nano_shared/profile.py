"""The interface profile: the versioned tools, dialect, prompts and observation format of a policy.

A checkpoint names the profile that it was trained with. A profile is never edited, only succeeded: its
hash is frozen by a test, and a reworded prompt is a new profile under a new name.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from nano_shared.hashing import content_hash
from nano_shared.types import ToolSpec, Value


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
    """Jinja template of the first user message; variables: prompt, files, check, instructions"""
    observation: ObservationFormat
    chat_template: str | None
    """Jinja chat template, or None for the one that the policy's tokenizer carries"""
    compaction: CompactionFormat | None = None
    """None: a run ends where its context is full"""
    completion_tokens: int = Field(256, ge=1, exclude=True)
    """usual limit of one completion; no part of the hash, as the policy does not see it"""
    describing: str | None = Field(None, exclude=True)
    """the profile whose system message describes a client's tools; None: this one"""

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # the hashes of profiles without compaction are what they were before there was any
        said: dict[str, Any] = handler(self)
        if self.compaction is None:
            said.pop("compaction", None)
        return said

    @property
    def hash(self) -> str:
        return content_hash(self.model_dump(mode="json"))

    @property
    def tools_hash(self) -> str:
        return content_hash([tool.model_dump(mode="json") for tool in self.tools])
