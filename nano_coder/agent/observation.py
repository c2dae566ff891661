"""Observations: shortens a tool's output to head and tail by tokens, with a marker first."""

from __future__ import annotations

from collections.abc import Callable

from nano_coder.sandbox.protocol import ExecResult
from nano_shared.printable import terminal_text
from nano_shared.profile import ObservationFormat
from nano_shared.types import Limits

_NO_PROCESS = (b"Resource temporarily unavailable", b"can't start new thread", b"Cannot fork")
_NO_SPACE = (b"No space left on device",)
_KILLED = 128 + 9
"""exit code of a shell whose last program got SIGKILL, as the kernel sends it beyond a group's limit"""


def limits_met(run: ExecResult, limits: Limits) -> str:
    """A sentence for each limit that cut a program, with the setting that raises it; empty for none."""
    said = (run.stdout[-4096:] + run.stderr[-4096:]) if not run.ok else b""
    met = [
        (run.timed_out, f"it was ended after {limits.tool_seconds:g} s (setting tool_seconds)"),
        (run.oom, f"its memory ended at {limits.memory_mb} MB (setting tool_memory_mb)"),
        (
            run.exit_code == _KILLED and not run.oom,
            f"what was killed may have met the limit of {limits.memory_mb} MB (setting tool_memory_mb)",
        ),
        (
            run.truncated,
            f"of each output the first and last part are kept, {limits.output_bytes} bytes in all (setting"
            " tool_output_bytes)",
        ),
        (
            any(text in said for text in _NO_PROCESS),
            "it may have met the limit of processes and threads (setting tool_processes)",
        ),
        (
            any(text in said for text in _NO_SPACE),
            "it may have met the limit of a workspace's size (setting workspace_mb)",
        ),
    ]
    return "".join(f"\n[{sentence}]" for holds, sentence in met if holds)


_AS_THEY_ARE = frozenset(("read_file", "read", "grep", "search"))
"""tools that show lines of files, which an edit has to repeat"""


def shorten(
    text: str, count: Callable[[str], int], form: ObservationFormat, *, full_output: str, tool: str = ""
) -> tuple[str, bool]:
    """The text for the model, and whether it was cut. `full_output` is the path of the whole output.

    It is what a terminal would show, but for the tools that show lines of files. The head has at most
    `head_tokens` and the tail at most `tail_tokens`, as counted by the policy.
    """
    if tool not in _AS_THEY_ARE:
        text = terminal_text(text)
    limit = form.head_tokens + form.tail_tokens
    # a token has at least one character, so a short text needs no counting
    if len(text) <= limit or count(text) <= limit:
        return text, False
    marker = f"[cut: first and last part of {len(text)} characters; all of it in {full_output}]"
    return f"{marker}\n{_ends(text, form.head_tokens, form.tail_tokens, count)}", True


def cut_to(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """The first and last part of a text of more than `tokens` tokens, which are about so many."""
    if count(text) <= tokens:
        return text
    ends = _ends(text, tokens // 2, tokens // 2, count)
    return f"[cut: first and last part of {len(text)} characters]\n{ends}"


def _ends(text: str, head_tokens: int, tail_tokens: int, count: Callable[[str], int]) -> str:
    head = text[: _fitting(text, head_tokens, count, from_end=False)]
    tail = text[len(text) - _fitting(text, tail_tokens, count, from_end=True) :]
    return f"{head}\n[...]\n{tail}"


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
