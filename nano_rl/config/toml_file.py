"""Configs as TOML, out and in: sections over the defaults they stand in, `none` where TOML has no null."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nano_rl.config.training import parse_config
from nano_rl.learn.config import Config
from nano_shared.errors import ConfigError, UsageError

NONE = "none"
"""how a setting without a value is written, in a file and on the command line"""
C = TypeVar("C", bound=Config)


def section_of(field: FieldInfo) -> type[Config] | None:
    """The config that a field holds, where it holds one."""
    kinds = alternatives(field.annotation)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Config)), None)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types a value may have: those of a union, or the one there is."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for part in get_args(annotation) for kind in alternatives(part))
    return (annotation,)


def takes_none(annotation: Any) -> bool:
    """Whether `none` stands for no value: not where it is a value itself."""
    kinds = alternatives(annotation)
    values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return NoneType in kinds and NONE not in values


def to_toml(config: Config) -> str:
    """The whole config as TOML, from which `parse_toml` makes the same one.

    Raises ConfigError for an open table (the settings of a reward's part) that holds a null.
    """
    import tomli_w

    return tomli_w.dumps(_written(config, ""))


def _written(config: Config, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            values[name] = _written(value, f"{prefix}{name}.")
        elif value is not None:
            values[name] = _plain(config.model_dump(mode="json", include={name})[name], prefix + name)
        elif takes_none(field.annotation):
            values[name] = NONE
    return values


def _plain(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(f"{name}: TOML cannot write null; leave the setting out")
    if isinstance(value, dict):
        return {key: _plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, name) for inner in value]
    return value


def read_settings(path: Path, kind: type[Config]) -> dict[str, Any]:
    """The settings of a TOML file as plain values, not yet judged. Raises UsageError where it is none."""
    try:
        return settings_in(path.read_text(encoding="utf-8"), kind)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}; --print-config writes one that works") from None
    except (OSError, UnicodeDecodeError, UsageError) as problem:
        raise UsageError(f"cannot read {path}: {problem}") from None


def settings_in(text: str, kind: type[Config]) -> dict[str, Any]:
    """The settings that a TOML text holds, as plain values. Raises UsageError for what is no TOML."""
    try:
        return _with_none(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as problem:
        raise UsageError(f"it is no TOML: {problem}") from None


def parse_toml(text: str, kind: type[C]) -> C:
    """A config from TOML. Raises ConfigError for settings that are wrong, UsageError for what is no TOML."""
    return parse_config(kind, over_defaults(kind, settings_in(text, kind)))


def _with_none(values: Mapping[str, Any], kind: type[Config]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in values.items():
        field = kind.model_fields.get(name)
        section = section_of(field) if field else None
        if section is not None and isinstance(value, Mapping):
            read[name] = _with_none(value, section)
        elif field is not None and value == NONE and takes_none(field.annotation):
            read[name] = None
        else:
            read[name] = value
    return read


def over_defaults(kind: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each section laid over the default that `kind` gives it rather than over its class's own.

    TrainConfig's learning rate is not OptimizerConfig's; to set another schedule must leave it as it is.
    """
    whole = dict(values)
    for name, field in kind.model_fields.items():
        given = whole.get(name)
        if isinstance(field.default, Config) and isinstance(given, Mapping):
            whole[name] = merged(field.default.model_dump(exclude_defaults=True), given)
    return whole


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, those of `above` winning."""
    both = dict(below)
    for name, value in above.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
