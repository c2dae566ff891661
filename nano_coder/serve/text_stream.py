"""Text of tokens while they are sampled: whole characters only, and nothing that may be a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nano_coder.serve.request import OnText
from nano_shared.policy import DecodeIds

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
        self._stopped = False

    def take(self, token: int, logprob: float) -> bool:
        """A sampled token. Returns whether the reader is still there."""
        self._ids.append(token)
        self._logprobs.append(logprob)
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
            self._on_text("" if self._stopped else self._held, tuple(self._ids), tuple(self._logprobs))
        self._held, self._ids, self._logprobs = "", [], []

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
        if not text:
            return True
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids, self._logprobs = [], []
        return self._on_text(text, ids, logprobs)
