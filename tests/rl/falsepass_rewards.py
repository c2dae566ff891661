"""Our graders as reward functions with TRL's signature, for falsepass, which loads this file by its path."""

from __future__ import annotations

from functools import cache
from typing import Any

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_shared.hidden_checks import AnswerChecks, Case, CaseChecks
from nano_shared.types import Task


@cache
def _sandbox() -> Sandbox:
    return open_sandbox()


def submitted(completions: list[str], answer: list[str], **_columns: Any) -> list[float | None]:
    """A completion is the answer that was submitted."""
    tasks = [Task(key="a", prompt="p", hidden=AnswerChecks(answer=right)) for right in answer]
    return [
        grade(task, files={}, answer=text, sandbox=_sandbox()).reward
        for task, text in zip(tasks, completions, strict=True)
    ]


def returned(completions: list[str], answer: list[str], **_columns: Any) -> list[float | None]:
    """A completion is the text that a function of the solution returns."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        hidden = CaseChecks(entry_point="f", cases=(Case(args=[], expected=right),))
        task = Task(key="a", prompt="p", artifacts=("solution.py",), hidden=hidden)
        source = f"def f():\n    return {text!r}\n".encode()
        rewards.append(grade(task, files={"solution.py": source}, answer=None, sandbox=_sandbox()).reward)
    return rewards
