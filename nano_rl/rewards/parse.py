"""`tests=1,process=0.2` or a file of settings, as the config of a reward."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from nano_rl.config.training import RewardConfig, parse_config
from nano_rl.rewards.registry import part_kind
from nano_rl.rewards.user_function import PREFIX
from nano_shared.errors import ConfigError, UsageError

SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def parse_reward(text: str) -> RewardConfig:
    """A reward by words, `part=weight,part:argument=weight,...`, or the name of a file that holds one.

    Raises UsageError for what is neither, ConfigError for settings that are wrong.
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
    """A TOML, JSON or YAML file as plain values. Raises UsageError where it cannot be read as such."""
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


def _argument(name: str) -> tuple[str, dict[str, str]]:
    """`judge:http://host/v1` as the part and the setting that its argument stands for."""
    if name.startswith(PREFIX):
        return name, {}
    part, colon, value = name.partition(":")
    setting = part_kind(part).argument
    if not colon and setting is not None and (meant := part_kind(part).unnamed()) is not None:
        return part, {setting: meant}
    if colon and setting is None:
        raise UsageError(f"--reward {name}: {part} takes no argument; write {part}=WEIGHT")
    return part, {setting: value} if colon and setting else {}
