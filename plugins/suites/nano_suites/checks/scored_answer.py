"""Answers that are scored by reasoning-gym in a jail.

Some of its scorers evaluate the answer as code. An answer that is more than a plain expression is not given
to those. The reward is 1 if the score is 1; partial scores, which hedging can earn, are kept in the component
`tests`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from contextlib import closing

from nano_coder.grading.hidden_cases import GradingOutcome, Submission
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError
from nano_shared.hidden_checks import AnswerChecks, Scorer
from nano_shared.printable import printable
from nano_shared.process import parse_expression
from nano_shared.types import Limits, Tampering

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


def grade_answer(given: Submission) -> GradingOutcome:
    """Raises SandboxError if the scorer could not be run."""
    hidden, answer = given.checks, given.answer
    assert isinstance(hidden, AnswerChecks)
    assert hidden.scorer is not None
    if answer is None:
        return _scored(0.0)
    if answer == hidden.answer:  # the scorer gave it 1 when the task was made
        return _scored(1.0)
    if len(answer) > LONGEST_ANSWER:
        return _scored(0.0, "answer_too_long")
    if hidden.scorer.dataset in EVALUATING and not plain(answer):
        return _scored(0.0, None, Tampering(kind="code_in_answer", detail=printable(answer[:200])))
    return _scored(ask_scorer(hidden.scorer, answer, given.sandbox))


def _scored(score: float, failure: str | None = None, *found: Tampering) -> GradingOutcome:
    return GradingOutcome({"answer": "pass" if score >= 1 - 1e-9 else "fail"}, found, failure, score=score)


def plain(answer: str) -> bool:
    """Whether evaluating the text can only compute with numbers, single letters and texts. A text that is no
    expression is let through: evaluating it fails. `!` is sympy's factorial."""
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
    """The score in [0, 1]; 0 if the scorer fails or does not end on the answer. Raises SandboxError if the
    question could not be made again, which is no fault of the answer."""
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
