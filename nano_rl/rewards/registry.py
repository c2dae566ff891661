"""Every part of a reward by its name; `py:module:function` names a function of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nano_rl.config import parse_config
from nano_rl.rewards.constitution import Constitution
from nano_rl.rewards.diff_size import DiffSize
from nano_rl.rewards.format import Format
from nano_rl.rewards.human import Human
from nano_rl.rewards.judge import Judge
from nano_rl.rewards.length import Length
from nano_rl.rewards.lint import Lint
from nano_rl.rewards.part import Part
from nano_rl.rewards.preference import Preference
from nano_rl.rewards.process import Process
from nano_rl.rewards.reasoning import Reasoning
from nano_rl.rewards.safety import Safety
from nano_rl.rewards.tests import Tests
from nano_rl.rewards.user_function import PREFIX, UserFunction
from nano_rl.rewards.visible_tests import VisibleTests
from nano_shared.errors import ConfigError

PARTS: dict[str, type[Part]] = {
    "tests": Tests,
    "visible_tests": VisibleTests,
    "process": Process,
    "format": Format,
    "length": Length,
    "diff_size": DiffSize,
    "lint": Lint,
    "reasoning": Reasoning,
    "safety": Safety,
    "judge": Judge,
    "constitution": Constitution,
    "preference": Preference,
    "human": Human,
}


def open_part(name: str, settings: Mapping[str, Any]) -> Part:
    """The part of that name with its settings. Raises ConfigError for what is unknown or cannot be."""
    if name.startswith(PREFIX):
        return _parsed(UserFunction, name, {"function": name.removeprefix(PREFIX), **settings})
    return _parsed(part_kind(name), name, settings)


def part_kind(name: str) -> type[Part]:
    """The class of the part of that name. Raises ConfigError with the names there are."""
    if name not in PARTS:
        raise ConfigError(
            f"unknown reward part {name!r}; parts: {', '.join(PARTS)}, or py:module:function of your own"
        )
    return PARTS[name]


def _parsed(kind: type[Part], name: str, settings: Mapping[str, Any]) -> Part:
    try:
        return parse_config(kind, settings)
    except ConfigError as problem:
        raise ConfigError(f"reward part {name}: {problem}") from None
