"""The Policy protocol: whoever completes a conversation."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from nano_shared.conversation import Conversation
from nano_shared.types import Completion, Sampling


@runtime_checkable
class Policy(Protocol):
    """Thread-safe: many agents call it at once. Keeps no hidden state but a KV cache.

    `id` names the weights (content hash or endpoint model), `version` counts the optimizer steps behind
    them, `context_limit` is the longest row in tokens, and `template_hash` identifies the chat template.
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
