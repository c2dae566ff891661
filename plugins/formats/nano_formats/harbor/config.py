"""`task.toml` and Dockerfile of a Harbor task, and their settings that a jail does not support."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field

from nano_formats.row_format import OpenModel
from nano_shared.errors import Refused
from nano_shared.strict_json import validated

PLAIN_IMAGES = frozenset({"ubuntu", "debian", "python", "bash", "busybox"})
"""base images with nothing but a shell, the usual programs and Python"""
_SAID_TWICE = frozenset({"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "SHELL", "STOPSIGNAL"})
"""instructions that are ignored, since Harbor starts the container with its own command"""
_OF_THE_IMAGE = frozenset({"FROM", "RUN", "ENV", "USER", "ARG", "HEALTHCHECK", "VOLUME"})
_COSMETIC = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "DEBIAN_FRONTEND", "LANG", "LC_ALL", "TZ", "TERM"}


@dataclass(frozen=True, slots=True)
class Image:
    """The initial state of a container of the image."""

    workdir: str
    files: dict[str, str]
    """path below the working directory -> text"""


def read_dockerfile(text: str, context: Mapping[str, str], name: str, *, built: bool = False) -> Image:
    """The image as plain files; `context` maps paths of the build context to texts. Of one that is `built`,
    the base, programs, variables and user are the image's own. Raises Refused with the line for instructions
    that need a container build."""
    workdir, copied, based = "/", dict[str, str](), False
    for number, word, rest in _instructions(text, name):
        field = f"{name}:{number}"
        if built and word in _OF_THE_IMAGE:
            based = True
        elif word == "FROM":
            if based:
                raise Refused(field, "builds in several stages, which needs Docker")
            _plain_image(rest, field)
            based = True
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip("\"'")))
        elif word == "COPY":
            copied.update(_copied(rest, context, workdir, field))
        elif word == "ENV":
            _cosmetic(rest, field)
        elif word == "RUN":
            if not re.fullmatch(r"mkdir (-p )?[\w./ -]+", rest):
                raise Refused(field, f"runs `{rest:.60}` while the image is built, which needs Docker")
        elif word == "USER":
            if rest not in ("root", "0"):
                raise Refused(field, f"works as user {rest!r}; a jail has one user")
        elif word not in _SAID_TWICE:
            raise Refused(field, f"{word} needs Docker")
    if not based:
        raise Refused(name, "names no base image")
    return Image(workdir, _below(workdir, copied, name))


def _instructions(text: str, name: str) -> Iterator[tuple[int, str, str]]:
    """Line number, instruction and arguments, with continued lines joined."""
    number, pending, start = 0, "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("#") or not (line.strip() or pending):
            continue
        start = start if pending else number
        pending += " " + line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        if "<<" in pending:
            raise Refused(f"{name}:{start}", "holds a here-document, which needs Docker")
        word, _, rest = pending.strip().partition(" ")
        yield start, word.upper(), " ".join(rest.split())
        pending = ""
    if pending.strip():
        raise Refused(f"{name}:{number}", "ends in the middle of an instruction")


def _plain_image(rest: str, field: str) -> None:
    image = rest.split()[0] if rest else ""
    repository = image.partition("@")[0].partition(":")[0].removeprefix("docker.io/").removeprefix("library/")
    if repository not in PLAIN_IMAGES or len(rest.split()) != 1:
        plain = ", ".join(sorted(PLAIN_IMAGES))
        raise Refused(field, f"starts from {rest!r}, whose programs a jail may lack; plain are {plain}")


def _cosmetic(rest: str, field: str) -> None:
    pairs = [part.partition("=")[0] for part in shlex.split(rest)] if "=" in rest else [rest.split(" ")[0]]
    if real := [key for key in pairs if key not in _COSMETIC]:
        raise Refused(field, f"sets {real[0]}; a jail starts with an empty environment")


def _copied(rest: str, context: Mapping[str, str], workdir: str, field: str) -> dict[str, str]:
    """Absolute target path -> text."""
    if rest.startswith("--"):
        raise Refused(field, f"COPY {rest.split()[0]} needs Docker")
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        raise Refused(field, f"cannot be read: COPY {rest:.60}") from None
    if len(words) < 2 or any(mark in word for word in words for mark in "*?[$"):
        raise Refused(field, "COPY takes plain sources and a target here, without wildcards or variables")
    *sources, target = words
    into = posixpath.normpath(posixpath.join(workdir, target))
    found: dict[str, str] = {}
    for source in sources:
        source = posixpath.normpath(source.lstrip("/") or ".")
        start = "" if source == "." else f"{source}/"
        below = {path[len(start) :]: text for path, text in context.items() if path.startswith(start)}
        if source in context:
            folder = target.endswith("/") or target == "." or len(sources) > 1
            name = posixpath.basename(source)
            found[posixpath.join(into, name) if folder else into] = context[source]
        elif below:
            found.update({posixpath.join(into, path): text for path, text in below.items()})
        else:
            raise Refused(field, f"copies {source!r}, which the build context does not hold as text")
    return found


def _below(workdir: str, copied: Mapping[str, str], name: str) -> dict[str, str]:
    if workdir == "/":
        raise Refused(name, "sets no WORKDIR, and a jail's root cannot be written to")
    outside = [path for path in copied if not path.startswith(f"{workdir}/")]
    if outside:
        raise Refused(name, f"copies to {outside[0]}, outside the working directory {workdir}")
    return {path[len(workdir) + 1 :]: text for path, text in copied.items()}


SCHEMA = "1.4"


class _Table(OpenModel):
    model_config = ConfigDict(strict=False)


class Phase(_Table):
    timeout_sec: float | None = Field(None, gt=0)
    user: str | int | None = None
    network_mode: str | None = None
    env: dict[str, str] = Field({})
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = Field([])


class EnvironmentTable(_Table):
    docker_image: str | None = Field(None, min_length=1)
    os: str = "linux"
    memory_mb: int | None = Field(None, ge=16)
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = Field([])
    env: dict[str, str] = Field({})
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
    metadata: dict[str, Any] = Field({})
    agent: Phase = Phase()
    verifier: Phase = Phase()
    environment: EnvironmentTable = EnvironmentTable()
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
    """(field, True if it is set, why it is not supported)."""
    place, agent, verifier = config.environment, config.agent, config.verifier
    network = "needs a network, and jails have none"
    separate = verifier.environment_mode == "separate" or verifier.environment
    return [
        ("steps", config.steps, "a task of several steps is not one task here"),
        ("environment.os", place.os != "linux", f"needs {place.os}"),
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
