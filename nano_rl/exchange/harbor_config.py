"""`task.toml` of a Harbor task, and what of it a jail without containers cannot give."""

from __future__ import annotations

import tomllib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nano_rl.exchange.jsonl import validated
from nano_rl.exchange.refusal import Refused

SCHEMA = "1.4"


class _Table(BaseModel):
    """Further keys are allowed: the file is kept whole."""

    model_config = ConfigDict(extra="allow")


class Phase(_Table):
    timeout_sec: float | None = Field(None, gt=0)
    user: str | int | None = None
    network_mode: str | None = None
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class Environment(_Table):
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: int | None = Field(None, ge=16)
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    network_mode: str | None = None
    allow_internet: bool | None = None


class Package(_Table):
    name: str = Field(min_length=1)


class HarborConfig(_Table):
    schema_version: str = SCHEMA
    task: Package | None = None
    metadata: dict[str, Any] = {}
    agent: Phase = Phase()
    verifier: Phase = Phase()
    environment: Environment = Environment()
    solution: Phase = Phase()
    steps: list[Any] | None = None


def read_config(text: str) -> HarborConfig:
    """Raises Refused for broken TOML, for a wrong type, and for what needs more than a jail."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise Refused("task.toml", f"is not TOML: {problem}") from None
    config = validated(HarborConfig, table, "task.toml")
    for field, wanted, why in _needs(config):
        if wanted:
            raise Refused(f"task.toml.{field}", why)
    return config


def _needs(config: HarborConfig) -> list[tuple[str, Any, str]]:
    """Field, whether it asks for something, and why that cannot be had."""
    place, agent, verifier = config.environment, config.agent, config.verifier
    network = "needs a network, and jails have none"
    separate = verifier.environment_mode == "separate" or verifier.environment
    return [
        ("steps", config.steps, "a task of several steps is not one task here"),
        ("environment.os", place.os != "linux", f"needs {place.os}"),
        ("environment.docker_image", place.docker_image, f"needs the container image {place.docker_image!r}"),
        ("environment.gpus", place.gpus, "needs a GPU"),
        ("environment.tpu", place.tpu, "needs a TPU"),
        ("environment.mcp_servers", place.mcp_servers, "needs servers that run beside the agent"),
        ("environment.healthcheck", place.healthcheck, "needs a service that runs beside the agent"),
        ("environment.skills_dir", place.skills_dir, "gives the agent skills, which have no place here"),
        ("environment.env", place.env, "a jail starts with an empty environment"),
        ("environment.network_mode", place.network_mode in ("public", "allowlist"), network),
        ("environment.allow_internet", place.allow_internet, network),
        ("agent.network_mode", agent.network_mode in ("public", "allowlist"), network),
        ("verifier.network_mode", verifier.network_mode in ("public", "allowlist"), network),
        ("agent.user", agent.user not in (None, "root", 0), "a jail has one user"),
        ("verifier.user", verifier.user not in (None, "root", 0), "a jail has one user"),
        ("verifier.environment_mode", separate, "verifies in a container image of its own"),
        ("verifier.collect", verifier.collect, "collects from services that run beside the agent"),
        ("verifier.env", any("$" in v for v in verifier.env.values()), "takes values from the host"),
        ("solution.env", config.solution.env, "a jail starts with an empty environment"),
    ]  # fmt: skip
