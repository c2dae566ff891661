"""Text of tokens while they are sampled: whole characters only, and nothing that may be a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from nano_coder.serve.request import OnText, TextDelta
from nano_shared.policy import DecodeIds

if TYPE_CHECKING:
    from nano_coder.models.local.sampler import Likeliest

_WINDOW = 32
"""tokens after which those already shown are decoded no more"""
_OVERLAP = 8
"""tokens decoded again before the new ones: some tokenizers write a token according to its neighbour"""


class TextStream:
    """Calls `on_text` with the text of the tokens that `take` gets."""

    def __init__(
        self, decode: DecodeIds, eos_ids: Collection[int], stop: Sequence[str], on_text: OnText
    ) -> None:
        self._decode, self._eos_ids, self._stop, self._on_text = decode, eos_ids, stop, on_text
        self._window: list[int] = []
        self._shown = ""
        """text of the window that was handed on or is held back"""
        self._held = ""
        """text that may be the beginning of a stop string"""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._told = 0
        self._stopped = False
        self.top: list[Likeliest] = []
        """of each token so far, if they come with their likeliest"""

    def take(self, token: int, logprob: float, likeliest: Likeliest = ()) -> bool:
        """A sampled token. Returns whether the reader is still there."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        self.top += [likeliest] if likeliest else []
        if token in self._eos_ids or self._stopped:
            return True
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the next token may complete the character
            return True
        new, self._shown = text[len(self._shown) :], text
        if len(self._window) > _WINDOW:
            self._window = self._window[-_OVERLAP:]
            self._shown = self._decode(self._window)
        return self._hand_on(self._held + new)

    def finish(self) -> None:
        """Hand on what is left: text held back, and tokens without text."""
        if not self._stopped:
            text = self._decode(self._window)
            self._held += text[len(self._shown) :]
        if self._held or self._ids:
            self._on_text(self._delta("" if self._stopped else self._held))
        self._held = ""

    def _hand_on(self, text: str) -> bool:
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self._stopped, self._held = True, ""
            return self._give(text[: min(ends)])
        kept = max(
            (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - kept :]
        return self._give(text[: len(text) - kept])

    def _give(self, text: str) -> bool:
        return self._on_text(self._delta(text)) if text else True

    def _delta(self, text: str) -> TextDelta:
        delta = TextDelta(text, tuple(self._ids), tuple(self._logprobs), tuple(self.top[self._told :]))
        self._ids, self._logprobs, self._told = [], [], len(self.top)
        return delta
