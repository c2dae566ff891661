"""Reward parts by name (entry points `nano.rewards`, or `py:module:function`), and parsing of `--reward`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_rl.config.training import RewardConfig
from nano_rl.rewards.part import Part
from nano_rl.rewards.user_function import PREFIX, UserFunction
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extensions import extension_names, find_extension, is_file_reference, takes
from nano_shared.settings import parse_config

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
