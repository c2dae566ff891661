"""Configuration: flag > environment (NANO_*) > project nano.toml > user config > default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nano_shared.errors import ConfigError
from nano_shared.redact import RedactConfig


class AgentConfig(BaseModel):
    """The settings of `nano-coder`; every one is a flag, a NANO_* variable and a key of nano.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    """checkpoint name, folder, hub id, or openai:NAME; None is the promoted or the shipped policy"""
    base_url: str | None = None
    api_key: str | None = Field(None, repr=False)
    sandbox: str = "ns"
    python: str | None = None
    """interpreter inside the jail; None is DIR/.venv, else ours"""
    max_turns: int = Field(24, ge=1)
    max_seconds: float = Field(600.0, gt=0)
    temperature: float = Field(0.0, ge=0)
    dtype: str = Field("auto", pattern="^(auto|bfloat16|float32)$")
    """of a local model's arithmetic; auto is float32 for up to 1 GiB of weights, bfloat16 for larger ones"""
    log: str | None = None
    """path or SQLAlchemy URL of the log; None is NANO_HOME/log.db"""
    exclude: tuple[str, ...] = ()
    """patterns for names that no run gets to see, beside version control, environments and caches"""
    redact: RedactConfig = RedactConfig()
    """secrets: `write` keeps them out of the log; `[redact]` also takes `patterns` and `allow`"""

    @field_validator("exclude", mode="before")
    @classmethod
    def _separated(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value

    @field_validator("exclude")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if not pattern or "/" in pattern:
                raise ValueError(f"{pattern!r} is no pattern for a name, as in *.ckpt or secrets")
        return value


def load_config(flags: Mapping[str, Any], directory: Path) -> tuple[AgentConfig, dict[str, str]]:
    """The effective configuration and, for each field, where its value came from.

    Raises ConfigError (exit code 3) that names the source, the key and the value.
    """
    layers = [
        ("user config", _read_toml(user_config_path())),
        ("nano.toml", _read_toml(directory / "nano.toml")),
        ("environment", _environment()),
        ("flag", {key: value for key, value in flags.items() if value not in (None, ())}),
    ]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(AgentConfig.model_fields, "default")
    for source, layer in layers:
        for key, value in layer.items():
            if key not in AgentConfig.model_fields:
                raise ConfigError(
                    f"{source}: unknown key {key!r}; known: {', '.join(AgentConfig.model_fields)}"
                )
            values[key] = _joined(values.get(key), value) if key == "redact" else value
            sources[key] = source
    if sources["base_url"] == "nano.toml" and sources["api_key"] in ("environment", "user config"):
        # a stranger's repository must not choose where the user's key is sent
        raise ConfigError(
            f"nano.toml sends your API key to {values['base_url']!r}; if you trust it, say --base-url"
        )
    user = layers[0][1].get("redact")
    if sources["redact"] == "nano.toml" and _is_on(user) and not _is_on(values["redact"]):
        # nor whether the user's log keeps secrets
        raise ConfigError(
            "nano.toml turns off the redaction of your config; if you mean it, say NANO_REDACT=off"
        )
    try:
        return AgentConfig.model_validate(values), sources
    except ValidationError as problem:
        error = problem.errors()[0]
        key = str(error["loc"][0])
        raise ConfigError(f"{sources[key]}: {key} = {values[key]!r}: {error['msg'].lower()}") from None


def _joined(below: Any, above: Any) -> Any:
    """A table over a table, key by key; a plain text is short for the key `on`."""
    layers = [{"on": layer} if isinstance(layer, str) else layer for layer in (below or {}, above)]
    return {**layers[0], **layers[1]} if all(isinstance(layer, dict) for layer in layers) else above


def _is_on(redact: Any) -> bool:
    return redact == "write" or (isinstance(redact, dict) and redact.get("on") == "write")


def user_config_path() -> Path:
    return platformdirs.user_config_path("nano") / "config.toml"


def _environment() -> dict[str, str]:
    """NANO_* variables that are settings; NANO_HOME and the like are not."""
    return {
        key: os.environ[f"NANO_{key.upper()}"]
        for key in AgentConfig.model_fields
        if os.environ.get(f"NANO_{key.upper()}")
    }


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
