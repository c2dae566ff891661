"""Parts of a reward by name: entry points of `nano.rewards`, or `py:module:function` of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nano_rl.config.training import parse_config
from nano_rl.rewards.part import Part
from nano_rl.rewards.user_function import PREFIX, UserFunction
from nano_shared.errors import ConfigError
from nano_shared.extensions import extension_names, find_extension, is_file_reference

GROUP = "nano.rewards"


def open_part(name: str, settings: Mapping[str, Any]) -> Part:
    """The part of that name with its settings. Raises ConfigError for what is unknown or cannot be."""
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
    return find_extension(GROUP, name, type, check=_no_part)


def _no_part(value: object) -> str | None:
    return (
        None if isinstance(value, type) and issubclass(value, Part) else "is no subclass of rewards.part.Part"
    )


def _parsed(kind: type[Part], name: str, settings: Mapping[str, Any]) -> Part:
    try:
        return parse_config(kind, settings)
    except ConfigError as problem:
        raise ConfigError(f"reward part {name}: {problem}") from None
