"""The chat template of a vision-language model: that of a text model, with images in the contents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nano_coder.agent.chat_template import NativeTemplate
from nano_coder.agent.dialects.dialect import Dialect
from nano_shared.errors import PolicyError
from nano_shared.types import Message, ToolSpec

_SLOT = "\U0010fffd"
"""stands for an image in a content; of no script"""


class VisionTemplate(NativeTemplate):
    """As that of a text model; each image is the template's own, with the tokens that the processor puts in
    its place. Not thread-safe while it shows images."""

    def __init__(
        self, source: str, tokenizer: Any, dialect: Dialect, end_id: int | None, *, image_token: str
    ) -> None:
        self._image_token, self._shown = image_token, tuple[str, ...]()
        super().__init__(source, tokenizer, dialect, end_id)

    @contextmanager
    def showing(self, texts: Sequence[str]) -> Iterator[None]:
        """Within the block the images of the messages are these texts, in order."""
        self._shown = tuple(texts)
        try:
            yield
        finally:
            self._shown = ()

    def _messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], structured: int
    ) -> list[dict[str, Any]]:
        if any(_SLOT in message.content for message in messages):
            raise PolicyError("a message holds the character U+10FFFD, which stands for an image")
        with_slots = [
            message.model_copy(update={"content": _SLOT * len(message.images) + message.content})
            for message in messages
        ]
        return super()._messages(with_slots, tools, structured)

    def _text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
        started: float | None = None, generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """Raises PolicyError for a template that does not write each image once."""
        count = sum(str(message["content"]).count(_SLOT) for message in messages)
        listed = [{**message, "content": _parts(message["content"])} for message in messages]
        text = super()._text(listed, tools, started, generation_prompt)
        if not count:
            return text
        pieces = text.split(self._image_token)
        if len(pieces) - 1 != count or count > len(self._shown):
            raise PolicyError(
                f"{self.name} writes {len(pieces) - 1} images of {count}, with {len(self._shown)} at hand"
            )
        return "".join(p for pair in zip(pieces, (*self._shown[:count], ""), strict=True) for p in pair)


def _parts(content: str) -> list[dict[str, str]]:
    """A content as the templates of such models take it: a list of images and texts."""
    first, *others = content.split(_SLOT)
    parts = [{"type": "text", "text": first}] if first or not others else []
    for text in others:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": text}] if text else []
    return parts
