"""Reward parts by name (entry points `nano.rewards`), functions of the user, and parsing of `--reward`.

`py:module:function` is a function of the user. With TRL's signature, `f(prompts, completions, **columns) ->
list[float]`, it is called once for the rollouts of one task; a function with other parameter names gets the
columns that it names. None in the returned list means no score.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from nano_coder.run.execution import Runtime
from nano_rl.config.training import RewardConfig
from nano_rl.rewards.part import Part, Score
from nano_rl.rewards.tests import outcome
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extensions import extension_names, find_extension, is_file_reference, takes
from nano_shared.settings import parse_config
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
        "completion_ids": [
            [i for t in run.turns if t.completion.tokens for i in t.completion.tokens.sampled_ids]
            for run in runs
        ],
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


def _number(value: object) -> float | None:
    """A number as a float, including numpy and torch scalars and bools; None for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


GROUP = "nano.rewards"


def open_part(name: str, settings: Mapping[str, Any]) -> Part:
    """The part of that name with its settings. Raises ConfigError for unknown names and invalid settings."""
    if name.startswith(PREFIX):
        return _parsed(UserFunction, name, {"function": name.removeprefix(PREFIX), **settings})
    return _parsed(part_kind(name), name, settings)


def part_kind(name: str) -> type[Part]:
    """The class of the part of that name, or of `path.py:name`. Raises ConfigError for an unknown one."""
    if not is_file_reference(name) and name not in extension_names(GROUP):
        raise ConfigError(
            f"unknown reward part {name!r}; parts: {', '.join(extension_names(GROUP))}, path.py:CLASS, or"
            " py:module:function of your own"
        )
    kind: type[Part] = find_extension(GROUP, name, check=_no_part)
    return kind


def _no_part(value: object) -> str | None:
    if not (isinstance(value, type) and issubclass(value, Part)):
        return "is no subclass of nano_rl.rewards.part.Part"
    if value.score is Part.score and value.score_run is Part.score_run:
        return "scores nothing: it has neither score_run(self, run, runtime) nor score(self, runs, runtime)"
    wrong = takes(value.score_run, "self", "run", "runtime") or takes(value.score, "self", "runs", "runtime")
    return f"has a method that {wrong}" if wrong else None


def _parsed(kind: type[Part], name: str, settings: Mapping[str, Any]) -> Part:
    try:
        return parse_config(kind, settings)
    except ConfigError as problem:
        raise ConfigError(f"reward part {name}: {problem}") from None


SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def parse_reward(text: str) -> RewardConfig:
    """The reward config of `part=weight,part:argument=weight,...`, or of a .toml, .json or .yaml file.

    Raises UsageError for any other text, ConfigError for invalid settings.
    """
    if text.endswith(SUFFIXES) and "=" not in text:
        return parse_config(RewardConfig, read_data(Path(text)))
    parts: dict[str, dict[str, Any]] = {}
    for item in text.split(","):
        name, equals, weight = item.strip().rpartition("=")
        try:
            number = float(weight)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise UsageError(
                f"--reward {item.strip()!r} is no part=weight; write for instance tests=1,process=0.2,"
                " or name a .toml, .json or .yaml file of settings"
            )
        name, settings = _argument(name)
        if name in parts:
            raise UsageError(f"--reward names {name} twice; give it one weight")
        parts[name] = {"weight": number, **settings}
    return parse_config(RewardConfig, {"parts": parts})


def read_data(path: Path) -> dict[str, Any]:
    """The values of a TOML, JSON or YAML file. Raises UsageError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        data = _decode(path, text)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except (OSError, ValueError) as problem:  # of JSON, TOML and Unicode alike
        raise UsageError(f"cannot read {path}: {problem}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no table of settings")
    return data


def _decode(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path} is neither .toml nor .json nor .yaml")
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs PyYAML (pip install pyyaml); or write it as TOML or JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(" ".join(str(problem).split())) from None


def _split(name: str) -> tuple[str, str, str]:
    """Part, colon and argument; a part in a file is `path.py:CLASS`, perhaps with an argument behind it."""
    file, suffix, rest = name.partition(".py:")
    if not suffix:
        return name.partition(":")
    kind, colon, value = rest.partition(":")
    return f"{file}{suffix}{kind}", colon, value


def _argument(name: str) -> tuple[str, dict[str, str]]:
    """Split `judge:http://host/v1` into the part and the setting given by its argument."""
    if name.startswith(PREFIX):
        return name, {}
    part, colon, value = _split(name)
    setting = part_kind(part).argument
    if not colon and setting is not None and (meant := part_kind(part).unnamed()) is not None:
        return part, {setting: meant}
    if colon and setting is None:
        raise UsageError(f"--reward {name}: {part} takes no argument; write {part}=WEIGHT")
    return part, {setting: value} if colon and setting else {}
