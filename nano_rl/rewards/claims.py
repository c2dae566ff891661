"""What a thought claims that can be looked up: lines, names, files, sums, the next action, the answer."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator

from nano_shared.types import ToolCall, Turn

Claim = tuple[str, bool]
"""the claim in words, and whether it holds"""

_LINE = re.compile(r"^[ \t]*(\d{1,6})\|(.*)$", re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]{1,200})`")
_FILE = re.compile(r"(?<![\w./-])([\w][\w./-]*\.(?:py|toml|cfg|ini|json|jsonl|csv|md|txt|sql|sh|ya?ml))\b")
_SUM = re.compile(
    r"(?<![\w.)])(-?\d{1,12}) ?([+*/%-]|//) ?(-?\d{1,12}) ?(?:=|==|is) ?(-?\d{1,24})(?!\w|\.\d| ?[-+*/%])"
)
_CONTINUES = re.compile(r"[-+*/%(=] ?$")
_ANSWER = re.compile(r"\b(?:the )?(?:final )?(?:answer|result) (?:is|=|must be) +[`'\"]?([^\s`'\",;]+)", re.I)
_OPERATORS: dict[str, Callable[[int, int], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip


def claims_of(turn: Turn, seen: str, written: str, answer: str | None) -> Iterator[Claim]:
    """The claims of one turn's thought. `seen` is all that the agent was shown before the turn, `written` all
    that it writes in the run, since a name may be planned; `answer` is what the run submitted in the end."""
    thought = turn.thought
    yield from _lines(thought, seen)
    yield from _names(thought, f"{seen}\n{written}")
    yield from _sums(thought)
    yield from _action(thought, turn.calls)
    yield from _answer(thought, turn.calls, answer)


def _lines(thought: str, seen: str) -> Iterator[Claim]:
    """`12|    return a`, as read_file shows a line: the text must be a line that was seen."""
    known = {line.strip() for line in seen.splitlines()}
    for number, text in _LINE.findall(thought):
        quoted = f"{number}|{text}".strip()
        yield f"line {quoted}", quoted in known or text.strip() in known


def _names(thought: str, known: str) -> Iterator[Claim]:
    """Files by name, and whatever stands in backquotes: it was seen, or is written."""
    for span in _SPAN.findall(thought):
        text = span.strip().removesuffix("()")
        yield f"`{text}`", text in known
    for name in _FILE.findall(_SPAN.sub(" ", thought)):
        yield f"file {name}", name.removeprefix("./") in known


def _sums(thought: str) -> Iterator[Claim]:
    for found in _SUM.finditer(thought):
        if _CONTINUES.search(thought[: found.start()]):
            continue  # the end of a longer sum
        left, sign, right, result = found.groups()
        a, b = int(left), int(right)
        if sign in ("/", "//", "%") and b == 0:
            yield f"{left} {sign} {right} = {result}", False
        else:
            yield f"{left} {sign} {right} = {result}", _OPERATORS[sign](a, b) == int(result)


def _action(thought: str, calls: tuple[ToolCall, ...]) -> Iterator[Claim]:
    """Lines were quoted, and one of them is edited; one file was named, and the one call touches it."""
    lines = {int(number) for number, _ in _LINE.findall(thought)}
    files = {name.removeprefix("./") for name in _FILE.findall(thought)}
    for call in calls:
        line, path = call.arguments.get("line"), call.arguments.get("path")
        if lines and isinstance(line, int):
            yield f"edits line {line}", line in lines
        if len(files) == len(calls) == 1 and isinstance(path, str):
            yield f"touches {path}", path.removeprefix("./") in files


def _answer(thought: str, calls: tuple[ToolCall, ...], answer: str | None) -> Iterator[Claim]:
    """An answer that was announced with the call that submits is the one that is submitted."""
    if answer is None or not any(call.name == "submit" for call in calls):
        return
    for said in _ANSWER.findall(thought):
        yield f"answer {said}", _plain(said.rstrip(".!?)")) == _plain(answer)


def _plain(text: str) -> object:
    """The value that a text spells, or the stripped text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()
