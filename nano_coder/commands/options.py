"""Options that commands share, the configuration they add up to, and the runtime it describes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from nano_coder.config import (
    TABLES,
    TEMPERATURE,
    AgentConfig,
    load_config,
    open_store,
    overriding_limits,
    parse_limits,
    user_config_path,
)
from nano_shared.errors import UsageError
from nano_shared.files import real_path
from nano_shared.printable import without_password
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedPolicy
    from nano_coder.run.execution import Runtime
    from nano_coder.run.git_history import GitHistory
    from nano_shared.policy import InterfaceProfile
    from nano_shared.store import LogStore
    from nano_shared.types import InstructionFile, Sampling, Trajectory

RunArgument = Annotated[
    str, Argument(metavar="RUN", help="An id, the beginning of one, or `last`, your newest run in -C.")
]
Log = Annotated[str | None, Option("--log", help="Path of the log, or postgresql://... of one.")]
Limit = Annotated[
    list[str] | None,
    Option(
        "--limit", metavar="NAME=VALUE",
        help="A limit in place of the task's own, such as max_turns=30; repeatable.",
    ),
]  # fmt: skip
ToolOption = Annotated[
    list[str] | None,
    Option(
        "--tool", metavar="NAME|FILE.py:NAME",
        help="One more tool for the agent, installed or in a file; repeatable.",
    ),
]  # fmt: skip
Net = Annotated[
    str | None,
    Option(
        "--net", metavar="none|allow=HOST,...",
        help="Hosts that runs may reach by HTTP(S), through a proxy; off unless given.",
    ),
]  # fmt: skip
DirectoryOption = Annotated[Path, Option("-C", metavar="DIR", help="Where the work is.")]
Verbose = Annotated[bool, Option("-v", "--verbose", help="Print long outputs whole on a terminal.")]

TaskChoice = Annotated[
    str | None, Option("--task", metavar="PATTERN", help="Runs of tasks whose key matches, as in 'sum-*'.")
]
SinceChoice = Annotated[
    str | None,
    Option("--since", metavar="WHEN", help="Runs begun since 2026-11-20, 2026-11-20T10:30, or 7d ago."),
]
PolicyChoice = Annotated[
    str | None,
    Option("--policy", metavar="NAME", help="Runs of a policy, by its name or the id of its weights."),
]
SuccessChoice = Annotated[
    bool, Option("--successes", help="Runs that ended by themselves with the full reward.")
]


class Setup(NamedTuple):
    """What a command works with: the configuration of the directory, loaded once."""

    config: AgentConfig
    sources: Mapping[str, str]
    """setting -> the layers that its value came from"""
    directory: Path = Path()

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that flags and the environment set, which replace those of a task of its own."""
        return overriding_limits(self.config, self.sources)


def agent_options(
    *settings: str, more: Sequence[str] = ("limit", "tools")
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command flags for these settings of the agent, --limit and --tool, and --config, --set and
    --print-config for all settings. It gets `setup: Setup`, loaded in its `directory` if it takes one."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(
            settings: Settings[AgentConfig],
            limit: Sequence[str] | None = None,
            tools: Sequence[str] | None = None,
            **given: Any,
        ) -> Any:
            return function(**given, setup=_set_up(settings, given.get("directory", Path()), limit, tools))

        signature = inspect.signature(function, eval_str=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [p.replace(kind=keyword) for name, p in signature.parameters.items() if name != "setup"]
        added = [inspect.Parameter(name, keyword, default=None, annotation=_MORE[name]) for name in more]
        given = inspect.Parameter("settings", keyword, annotation=Settings)
        command.__dict__["__signature__"] = signature.replace(parameters=[*own, given, *added])
        names = {"image": "--container-image"}  # --image is what a model is shown
        return settings_options(AgentConfig, {"Settings": settings}, names=names)(command)

    return decorate


_MORE = {"limit": Limit, "tools": ToolOption}


def _set_up(
    settings: Settings[AgentConfig], directory: Path, limit: Sequence[str] | None, tools: Sequence[str] | None
) -> Setup:
    """Load the configuration; --print-config ends here. Raises UsageError for a directory that is none, and
    for a wrong flag; ConfigError for what a file says."""
    _refuse_missing(directory)
    more = {"tools": tuple(tools)} if tools else {}
    replace(settings, print_only=False).config()  # which names the flag that is wrong
    config, sources = load_config({**settings.values, **parse_limits(limit), **more}, directory)
    if settings.print_only:
        settings.show(masked(config, None))
    return Setup(config, sources, directory)


def masked(config: AgentConfig, mark: str | None) -> AgentConfig:
    """The configuration as it is shown: a mark, or nothing, for each secret, and no password of the log."""
    tables = {name: table.shown(getattr(config, name), mark) for name, table in TABLES.items()}
    log = config.log and without_password(config.log)
    return config.model_copy(update={"api_key": config.api_key and mark, "log": log, **tables})


def _refuse_missing(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(f"no such directory: {directory}; -C names the directory to work in")


def log_of_environment() -> tuple[str, ...]:
    """The log of NANO_LOG, where it is set: nearer than what a training or a file names."""
    config, sources = load_config({}, Path())
    return (config.log,) if config.log and sources["log"] == "environment" else ()


def open_log(log: str | None, directory: Path = Path(), *, create: bool = False) -> LogStore:
    """The log of --log, else as configured. Raises LogError where there is none and `create` is not set."""
    _refuse_missing(directory)
    return open_store(load_config({"log": log}, directory)[0], directory, create=create)


def open_runtime(
    config: AgentConfig, directory: Path, store: LogStore, *, model: str | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Runtime:  # fmt: skip
    """Sandbox first, since it refuses in milliseconds, then the policy, which takes seconds to load.

    `limits` take the place of a task's own (`overriding_limits`).
    """
    from nano_coder.agent.profiles import days_profile, with_tools
    from nano_coder.config import note_scrub, redacting_store
    from nano_coder.models.opening import default_model, open_policy
    from nano_coder.run.execution import Project, RunSettings, Runtime
    from nano_coder.sandbox.protocol import allowed_hosts, open_sandbox
    from nano_coder.tools.tool import further_tools
    from nano_shared.owners import project_id

    python = python_of(config, directory)
    sandbox = open_sandbox(config.sandbox, python=python, image=config.image, project=directory)
    more = further_tools(config, lambda: (sandbox, store))
    name = model or config.model or default_model(project_id(directory), checked=bool(config.check))
    opened = open_policy(name, config, own_temperature=config.temperature is None)
    profile = opened.profile if config.profile else days_profile(opened.profile)
    settings = RunSettings(
        limits=limits or {}, hosts=allowed_hosts(config.net), search=config.search, ends_repetition=True
    )
    return Runtime(
        policy=opened.policy, sandbox=sandbox, profile=with_tools(profile, more),
        store=redacting_store(store, getattr(opened.policy, "decode", None), config),
        sampling=_sampling(config, profile), policy_name=opened.name, settings=settings,
        project=Project(notes=store.notes(str(directory.resolve()), note_scrub(config))),
    )  # fmt: skip


def _sampling(config: AgentConfig, profile: InterfaceProfile) -> Sampling:
    from nano_shared.types import Sampling

    usual = 0.0 if profile.places else TEMPERATURE  # the likeliest answers, one after another
    return Sampling(
        temperature=usual if config.temperature is None else config.temperature,
        max_tokens=config.max_completion_tokens or profile.completion_tokens,
    )


def in_place_of(local: Runtime, hosted: OpenedPolicy, config: AgentConfig) -> Runtime:
    """The runtime in which a hosted model does the work of the local one, with the same tools."""
    from nano_coder.agent.profiles import hosted_profile

    profile = hosted_profile(local.profile)
    return replace(
        local, policy=hosted.policy, policy_name=hosted.name, profile=profile,
        sampling=_sampling(config, profile),
    )  # fmt: skip


def history_of(directory: Path, config: AgentConfig) -> GitHistory | None:
    """What runs in the directory see of its history; stderr says why where they see none of it."""
    around = (directory, *directory.resolve().parents)
    if config.git is False or not any(os.path.lexists(folder / ".git") for folder in around):
        return None
    from nano_coder.run.git_history import NoHistory, find_history, say_left_out

    try:
        found = find_history(directory)
    except NoHistory as reason:
        say_left_out(str(reason))
        return None
    if found and config.git is None and config.exclude:
        say_left_out("it may hold what `exclude` keeps from runs; git = true in your config shows it")
        return None
    return found


def instructions_of(
    directory: Path, config: AgentConfig, profile: InterfaceProfile
) -> tuple[InstructionFile, ...]:
    """The chain of AGENTS.md that holds in the directory; empty for a profile that does not show it."""
    from nano_coder.trust import find_instructions

    if "instructions" not in profile.task:
        return ()
    return find_instructions(directory, config.instructions, user_config_path().parent, config.exclude)


def reopen_runtime(run: Trajectory, setup: Setup, store: LogStore) -> Runtime:
    """The runtime to go on with a logged run, under its model and profile unless others are set.

    Its git history is shown only by `git = true`, as the log keeps no --exclude of the run.
    """
    from nano_coder.agent.profiles import PROFILES
    from nano_coder.models.opening import find_opener

    config, directory = setup.config, Path(run.directory or "")
    logged, hosted = run.profile.partition("+")[0], find_opener(config.model or run.policy) is not None
    if config.profile is None and (hosted or (logged in PROFILES and PROFILES.find(logged).places)):
        config = config.model_copy(update={"profile": logged})
    runtime = open_runtime(config, directory, store, model=config.model or run.policy, limits=setup.limits)
    history = history_of(Path(run.directory), config) if run.directory and config.git else None
    return replace(runtime, project=replace(runtime.project, history=history))


def python_of(config: AgentConfig, directory: Path) -> str | None:
    """The interpreter that is set, else the project's own, which an image has; an environment that lies
    elsewhere, behind a link, is mounted for nobody unasked."""
    if config.python or config.sandbox == "podman":
        return config.python
    environment = directory / ".venv"
    python = environment / "bin" / "python"
    inside = real_path(environment) == directory.resolve() / ".venv"
    return str(python.absolute()) if inside and python.exists() else None
