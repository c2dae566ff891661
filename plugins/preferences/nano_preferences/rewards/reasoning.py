"""`reasoning`: the share of checkable claims in the agent's thoughts that are true.

Deterministic: claims are quoted lines, file names, sums, the announced action and the announced answer. One
false claim caps the score at 0.5, so that a right answer with flawed reasoning earns less and adding true
claims does not help. A run without claims has no score.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator

from nano_coder.run.execution import Runtime
from nano_rl.rewards.reward import SILENT, Part, Score
from nano_shared import snapshot
from nano_shared.process import parse_expression
from nano_shared.types import ToolCall, Trajectory, Turn

Claim = tuple[str, bool]
"""the claim as text, and whether it is true"""

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
    """The claims in the thought of one turn. `seen` is all text that the agent was shown before the turn,
    `written` all text that it writes in the run (it may name what it will write), `answer` what the run
    submitted."""
    thought = turn.thought
    yield from _lines(thought, seen)
    yield from _names(thought, f"{seen}\n{written}")
    yield from _sums(thought)
    yield from _action(thought, turn.calls)
    yield from _answer(thought, turn.calls, answer)


def _lines(thought: str, seen: str) -> Iterator[Claim]:
    """Claims of the form `12|    return a`, as read_file shows a line: true if the line was seen."""
    known = {line.strip() for line in seen.splitlines()}
    for number, text in _LINE.findall(thought):
        quoted = f"{number}|{text}".strip()
        yield f"line {quoted}", quoted in known or text.strip() in known


def _names(thought: str, known: str) -> Iterator[Claim]:
    """File names and text in backquotes: true if seen before, or written in the run."""
    for span in _SPAN.findall(thought):
        text = span.strip().removesuffix("()")
        yield f"`{text}`", text in known
    for name in _FILE.findall(_SPAN.sub(" ", thought)):
        yield f"file {name}", name.removeprefix("./") in known


def _sums(thought: str) -> Iterator[Claim]:
    for found in _SUM.finditer(thought):
        if _CONTINUES.search(thought[: found.start()]):
            continue  # part of a longer sum
        left, sign, right, result = found.groups()
        a, b = int(left), int(right)
        if sign in ("/", "//", "%") and b == 0:
            yield f"{left} {sign} {right} = {result}", False
        else:
            yield f"{left} {sign} {right} = {result}", _OPERATORS[sign](a, b) == int(result)


def _action(thought: str, calls: tuple[ToolCall, ...]) -> Iterator[Claim]:
    """An edited line must be among the quoted lines; a single call must use the single file that is named."""
    lines = {int(number) for number, _ in _LINE.findall(thought)}
    files = {name.removeprefix("./") for name in _FILE.findall(thought)}
    for call in calls:
        line, path = call.arguments.get("line"), call.arguments.get("path")
        if lines and isinstance(line, int):
            yield f"edits line {line}", line in lines
        if len(files) == len(calls) == 1 and isinstance(path, str):
            yield f"touches {path}", path.removeprefix("./") in files


def _answer(thought: str, calls: tuple[ToolCall, ...], answer: str | None) -> Iterator[Claim]:
    """An answer announced together with the submit call must be the submitted one."""
    if answer is None or not any(call.name == "submit" for call in calls):
        return
    for said in _ANSWER.findall(thought):
        yield f"answer {said}", _plain(said.rstrip(".!?)")) == _plain(answer)


def _plain(text: str) -> object:
    """The value of a Python literal, or else the stripped text."""
    try:
        return ast.literal_eval(parse_expression(text.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


FLAWED = 0.5
"""largest score of a run with a false claim"""


Tally = namedtuple("Tally", "held failed")


class Reasoning(Part):
    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        start = snapshot.load(run.snapshot, runtime.store.blobs).entries if run.snapshot else ()
        held, failed = count_claims(run, [entry.path for entry in start])
        if held + failed == 0:
            return SILENT
        share = held / (held + failed)
        return Score(value=1.0 if failed == 0 else FLAWED * share, details={"claims_held": share})


def count_claims(run: Trajectory, paths: Iterable[str] = ()) -> Tally:
    """The number of true and false distinct claims over all turns; each is checked against what was seen by
    then. `paths` are the files of the workspace, whose names the first message shows."""
    calls = [call for turn in run.turns for call in turn.calls]
    written = "\n".join(text for call in calls for text in (call.name, *map(str, call.arguments.values())))
    seen = "\n".join([run.task.prompt, run.task.check or "", *paths, *run.task.files.values()])
    judged: dict[str, bool] = {}
    for turn in run.turns:
        for claim, holds in claims_of(turn, seen, written, run.answer):
            # a claim that was false once counts as false
            judged[claim] = judged.get(claim, True) and holds
        shown = [observation.text for observation in turn.observations]
        seen = "\n".join([seen, *(str(v) for c in turn.calls for v in c.arguments.values()), *shown])
    held = sum(judged.values())
    return Tally(held, len(judged) - held)
