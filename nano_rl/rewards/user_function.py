"""`py:module:function`: a reward function of the user, with the signature of TRL or with columns by name.

A function with TRL's signature, `f(prompts, completions, **columns) -> list[float]`, is called once for the
rollouts of one task; a function with other parameter names gets the columns that it names. None in the
returned list means no score.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from pydantic import PrivateAttr

from nano_coder.run.execution import Runtime
from nano_rl.rewards.outcome import outcome
from nano_rl.rewards.part import Part, Score
from nano_shared.errors import ConfigError, UsageError
from nano_shared.types import Trajectory

PREFIX = "py:"


class UserFunction(Part):
    alone = True

    function: str
    """module:function"""
    low: float = 0.0
    """smallest value of the function, which is scaled to 0"""
    high: float = 1.0
    """largest value of the function, which is scaled to 1"""
    messages: bool = False
    """prompts and completions as lists of chat messages instead of texts"""
    _function: Callable[..., Any] | None = PrivateAttr(None)

    def prepare(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"low = {self.low:g} must be less than high = {self.high:g}")
        self._function = load_function(self.function)
        self._accepted()

    def score(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Score]:
        """Raises UsageError unless the result is one number between `low` and `high` per rollout.

        Exceptions of the function are not caught, so that its author sees the traceback.
        """
        assert self._function is not None  # `prepare` has loaded it
        accepted = self._accepted()
        columns = {k: v for k, v in _columns(runs, messages=self.messages).items() if k in accepted}
        result = self._function(**columns)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        values = list(result) if isinstance(result, Iterable) and not isinstance(result, str) else None
        if values is None or len(values) != len(runs):
            given = type(result).__name__ if values is None else f"{len(values)} values"
            raise UsageError(
                f"{PREFIX}{self.function} returned {given} for {len(runs)} completions;"
                " it must return a list with one number for each"
            )
        return [Score(value=self._scaled(value, run)) for value, run in zip(values, runs, strict=True)]

    def _scaled(self, value: object, run: Trajectory) -> float | None:
        if value is None:
            return None
        number = _number(value)
        if number is None or not (math.isfinite(number) and self.low <= number <= self.high):
            raise UsageError(
                f"{PREFIX}{self.function} gave {value!r} to run {run.id}; it must give a number between"
                f" {self.low:g} and {self.high:g} (low and high can be set in the file of the reward)"
            )
        return (number - self.low) / (self.high - self.low)

    def _accepted(self) -> set[str]:
        """Columns that the function takes. Raises ConfigError for a required parameter that is no column."""
        assert self._function is not None
        names = set(COLUMNS)
        taken = set()
        for parameter in inspect.signature(self._function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                return names
            if parameter.name in names and parameter.kind is not parameter.POSITIONAL_ONLY:
                taken.add(parameter.name)
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise ConfigError(
                    f"{self.function} wants {parameter.name!r}, which no rollout has; columns:"
                    f" {', '.join(COLUMNS)}"
                )
        return taken


def load_function(path: str) -> Callable[..., Any]:
    """Import the function of `module:function`, also from the current folder. Raises ConfigError."""
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise ConfigError(f"{PREFIX}{path}: write py:module:function")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as problem:
        raise ConfigError(f"{PREFIX}{path}: cannot import {module}: {problem}") from None
    if not callable(found):
        raise ConfigError(f"{PREFIX}{path}: {module} has no function {name}")
    return found  # type: ignore[no-any-return]


COLUMNS = (
    "prompts", "completions", "completion_ids", "tests", "answer", "diff", "key", "level", "family", "view",
    "trajectories",
)  # fmt: skip
"""columns that a function may take, each with one value per rollout"""


def _columns(runs: Sequence[Trajectory], *, messages: bool) -> dict[str, list[Any]]:
    texts = [[turn.completion.text for turn in run.turns] for run in runs]
    if messages:
        prompts: list[Any] = [[{"role": "user", "content": run.task.prompt}] for run in runs]
        completions: list[Any] = [_conversation(run) for run in runs]
    else:
        prompts, completions = [run.task.prompt for run in runs], ["\n".join(parts) for parts in texts]
    columns: dict[str, list[Any]] = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [_sampled(run) for run in runs],
        "tests": [outcome(run.verdict) for run in runs],
        "answer": [run.answer for run in runs],
        "diff": [run.diff for run in runs],
        "trajectories": list(runs),
    }
    return columns | {
        name: [getattr(r.task, name) for r in runs] for name in ("key", "level", "family", "view")
    }


def _conversation(run: Trajectory) -> list[dict[str, str]]:
    rows = []
    for turn in run.turns:
        rows.append({"role": "assistant", "content": turn.completion.text})
        rows += [{"role": "tool", "content": o.text} for o in turn.observations]
    return rows


def _sampled(run: Trajectory) -> list[int]:
    return [i for t in run.turns if t.completion.tokens for i in t.completion.tokens.sampled_ids]


def _number(value: object) -> float | None:
    """A number as a float, including numpy and torch scalars and bools; None for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
