"""Observations: shortens a tool's output to head and tail by tokens, with a marker first."""

from __future__ import annotations

from collections.abc import Callable

from nano_shared.profile import ObservationFormat


def shorten(
    text: str, count: Callable[[str], int], form: ObservationFormat, *, full_output: str
) -> tuple[str, bool]:
    """The text for the model, and whether it was cut. `full_output` is the path of the whole output.

    The head has at most `head_tokens` and the tail at most `tail_tokens`, as counted by the policy.
    """
    limit = form.head_tokens + form.tail_tokens
    # a token has at least one character, so a short text needs no counting
    if len(text) <= limit or count(text) <= limit:
        return text, False
    head = text[: _fitting(text, form.head_tokens, count, from_end=False)]
    tail = text[len(text) - _fitting(text, form.tail_tokens, count, from_end=True) :]
    marker = f"[cut: first and last part of {len(text)} characters; all of it in {full_output}]"
    return f"{marker}\n{head}\n[...]\n{tail}", True


def _fitting(text: str, tokens: int, count: Callable[[str], int], *, from_end: bool) -> int:
    """How many characters from one end fit into `tokens`; by bisection."""
    low, high = 0, min(len(text), tokens * 16)
    while low < high:
        middle = (low + high + 1) // 2
        piece = text[len(text) - middle :] if from_end else text[:middle]
        if count(piece) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low
