"""A rich console for untrusted text: brackets are no markup, and control characters are escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from nano_shared.printable import GuardedStream, printable


class Console(rich.console.Console):
    """Style comes from Text and `style=`, never from the contents of a text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    @property
    def file(self) -> IO[str]:
        stream = super().file
        if isinstance(stream, GuardedStream):
            stream.flush()
            return stream.styled
        return stream

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        # before its width is measured
        return super().render_str(printable(text, None), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, None), segment.style)
