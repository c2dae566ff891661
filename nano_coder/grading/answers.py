"""Answers: equal by exact plain types, as a text or a literal; or scored by reasoning-gym in a jail.

Some of reasoning-gym's scorers evaluate the answer as code. An answer that is more than a plain expression is
not given to those. The reward is 1 if the score is 1; partial scores, which hedging can earn, are kept in the
component `tests`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from contextlib import closing, suppress
from typing import Any, NamedTuple

from pydantic import JsonValue

from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError
from nano_shared.hidden_checks import Scorer
from nano_shared.printable import printable
from nano_shared.process import parse_expression
from nano_shared.types import Limits, Tampering

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""a number as JSON writes it; no other spelling is accepted"""
_LONGEST = 100_000
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.]+|\s+|.""", re.DOTALL)


def same(given: Any, expected: Any) -> bool:
    """Equal in value and exact type, recursively: True is not 1, 1 is not 1.0, NaN equals nothing."""
    if type(given) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    return bool(given == expected)


def same_answer(text: str | None, expected: Any) -> bool:
    """Whether a submitted text gives the expected value.

    No answer is never right. If a text is expected, texts are compared, ignoring blanks and quotes around
    them and, in a bracketed text, blanks between items and the kind of quotes. Any other value is read from
    JSON or a Python literal, with numbers spelt as JSON spells them: an answer must not be the question in
    another notation.
    """
    if text is None:
        return False
    if isinstance(expected, str):
        return _parts(text) == _parts(expected)
    return any(same(reading, expected) for reading in _readings(text.strip()))


def _parts(text: str) -> list[str]:
    """A text without blanks and quotes around it; a bracketed one as a list of its tokens."""
    text = text.strip()
    if text[:1] in "([{" and text[-1:] in ")]}" and 2 <= len(text) <= _LONGEST:
        return [_unquoted(token) for token in _TOKEN.findall(text) if not token.isspace()]
    return [_without_quotes(text).strip()]


def _unquoted(token: str) -> str:
    """A quoted token as a mark and its text, so that it differs from the same token without quotes."""
    inner = _without_quotes(token)
    return token if inner == token else f"'{inner}"


def _without_quotes(text: str) -> str:
    if len(text) < 2 or text[0] not in "'\"" or text[0] != text[-1]:
        return text
    # only escaped quotes are undone: any other escape is part of the text
    return re.sub(r"\\(.)", lambda m: m[1] if m[1] in "'\"" else m[0], text[1:-1], flags=re.DOTALL)


def _readings(text: str) -> list[Any]:
    """The values that a text spells as JSON and as a Python literal (tuples as lists)."""
    readings: list[Any] = []
    if len(text) > _LONGEST or not _plainly_spelt(text):
        return readings
    with suppress(ValueError, RecursionError):
        readings.append(json.loads(text))
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        readings.append(_lists(ast.literal_eval(parse_expression(text.lstrip(" \t")))))
    return readings


def _plainly_spelt(text: str) -> bool:
    """Whether every number outside quotes is spelt as JSON spells it."""
    before = ""
    for token in _TOKEN.findall(text):
        if token == "+" and not _SCALED.fullmatch(before):
            return False
        before = token
        known = token.isalpha() or NUMBER.fullmatch(token) or _SCALED.fullmatch(token)
        if re.match(r"[\w.]", token) and not known:
            return False
    return True


_SCALED = re.compile(r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE]")
"""the part of 1e-5 that `_TOKEN` matches before the sign"""


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


_EVALUATING = """
binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24
simple_integration spiral_matrix string_insertion
"""
EVALUATING = frozenset(_EVALUATING.split())
"""datasets of reasoning-gym 0.1.25 whose scorers evaluate the answer"""
LONGEST_ANSWER = 20_000
_PROGRAM = """\
import hashlib
import json
import os
import sys

import reasoning_gym

def main() -> None:
    job = json.load(sys.stdin)
    # prints of a dataset must not mix with the answers
    out, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr
    dataset = reasoning_gym.create_dataset(job["dataset"], seed=job["seed"], size=1, **job["config"])
    entry = dataset[0]
    digest = hashlib.sha256(entry["question"].encode("utf-8", "surrogatepass")).hexdigest()
    if job["question"] != f"sha256:{digest}":
        sys.exit("another question was made")
    print("ready", file=out, flush=True)
    score = float(dataset.score_answer(job["answer"], entry))
    print(json.dumps(score), file=out, flush=True)

main()
"""
"""runs in the jail: says `ready` after making the question that was asked again, then the score"""
_SECONDS = 120.0
_LIMITS = Limits(memory_mb=2048)
_FUNCTIONS = frozenset(("sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "Abs", "pi"))
_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.Name, ast.Call, ast.Load,
    ast.operator, ast.unaryop,
)  # fmt: skip


class AnswerScore(NamedTuple):
    value: float
    """in [0, 1]"""
    failure_kind: str | None = None
    tampering: tuple[Tampering, ...] = ()


def score_answer(answer: str | None, expected: JsonValue, scorer: Scorer, sandbox: Sandbox) -> AnswerScore:
    """Raises SandboxError if the scorer could not be run."""
    if answer is None:
        return AnswerScore(0.0)
    if answer == expected:  # the scorer gave it 1 when the task was made
        return AnswerScore(1.0)
    if len(answer) > LONGEST_ANSWER:
        return AnswerScore(0.0, "answer_too_long")
    if scorer.dataset in EVALUATING and not plain(answer):
        return AnswerScore(0.0, None, (Tampering(kind="code_in_answer", detail=printable(answer[:200])),))
    return AnswerScore(ask_scorer(scorer, answer, sandbox))


def plain(answer: str) -> bool:
    """Whether evaluating the text can only compute with numbers, single letters and texts.

    A text that is no expression is let through: evaluating it fails. `!` is sympy's factorial.
    """
    if re.fullmatch(r"[\w\s]*", answer):
        return True  # words and numbers: nothing is called
    try:
        tree = parse_expression(answer.strip().replace("!", ""))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "(" not in answer or not any(c.isalpha() or c == "_" for c in answer)
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return False
        if isinstance(node, ast.Name) and len(node.id) > 1 and node.id not in _FUNCTIONS:
            return False
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        ):
            return False
        if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | str):
            return False
    return True


def ask_scorer(scorer: Scorer, answer: str, sandbox: Sandbox) -> float:
    """The score in [0, 1]; 0 if the scorer fails or does not end on the answer.

    Raises SandboxError if the question could not be made again, which is no fault of the answer.
    """
    job = {**scorer.model_dump(include={"dataset", "seed", "config", "question"}), "answer": answer}
    with closing(sandbox.open(None, _LIMITS)) as jail:
        done = jail.run(
            [sandbox.python, "-P", "-W", "ignore", "-c", _PROGRAM],
            stdin=json.dumps(job).encode(),
            timeout=_SECONDS,
            # some questions depend on the iteration order of sets
            env={"PYTHONHASHSEED": "0", "MPLCONFIGDIR": "/tmp"},
        )
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if "ready" not in lines:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise SandboxError(
            f"reasoning-gym {scorer.version} could not make the question of {scorer.dataset} again: {said[0]}"
        )
    try:
        score = float(lines[-1]) if done.ok else 0.0
    except ValueError:
        return 0.0
    return score if math.isfinite(score) and 0 <= score <= 1 else 0.0
