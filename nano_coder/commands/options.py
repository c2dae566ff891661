"""Options that every executing command shares, and the runtime they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from nano_coder.agent.profiles import with_tools
from nano_coder.config import AgentConfig
from nano_coder.models.opening import open_policy
from nano_coder.run.execution import Runtime
from nano_coder.run.git_history import GitHistory, NoHistory, find_history, say_left_out
from nano_coder.run.redacting_log import redacting_store
from nano_coder.sandbox import open_sandbox
from nano_coder.tools import TOOLS
from nano_shared.command_line import limit_option
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Trajectory

_OPTIONS = (
    click.option("--model", help="Checkpoint name, folder, hub id, or openai:NAME with --base-url."),
    click.option("--base-url", help="URL of an OpenAI-compatible endpoint."),
    click.option("--profile", help="Interface profile, in place of the model's own."),
    click.option(
        "--tool",
        "tools",
        multiple=True,
        metavar="NAME|FILE.py:NAME",
        help="One more tool for the agent, installed or in a file; repeatable.",
    ),
    click.option(
        "--sandbox",
        help="Isolation: ns, bwrap, none (which needs an environment variable), or one of an extension.",
    ),
    click.option("--python", help="Interpreter inside the sandbox."),
    click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float32"]),
        help="Arithmetic of a local model; auto: float32 for small ones.",
    ),
    click.option("--log", help="Path or SQLAlchemy URL of the log."),
    limit_option,
)


def execution_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def open_runtime(
    config: AgentConfig,
    directory: Path,
    store: LogStore,
    *,
    model: str | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Runtime:
    """Sandbox first, since it refuses in milliseconds, then the policy, which takes seconds to load.

    `limits` take the place of a task's own (`said_limits`).
    """
    sandbox = open_sandbox(config.sandbox, python=config.python or _project_python(directory))
    more = [TOOLS.give(tool).spec.name for tool in config.tools]
    opened = open_policy(
        model or config.model, base_url=config.base_url, api_key=config.api_key, dtype=config.dtype,
        profile=config.profile,
    )  # fmt: skip
    return Runtime(
        policy=opened.policy,
        sandbox=sandbox,
        store=redacting_store(store, getattr(opened.policy, "decode", None), config),
        profile=with_tools(opened.profile, more),
        sampling=Sampling(temperature=config.temperature, max_tokens=config.max_completion_tokens),
        limits=limits or {},
        policy_name=opened.name,
    )


def history_of(directory: Path, config: AgentConfig) -> GitHistory | None:
    """What runs in the directory see of its history; stderr says why where they see none of it."""
    try:
        found = find_history(directory) if config.git is not False else None
    except NoHistory as reason:
        say_left_out(str(reason))
        return None
    if found and config.git is None and config.exclude:
        say_left_out("it may hold what `exclude` keeps from runs; git = true in your config shows it")
        return None
    return found


def earlier_history(run: Trajectory, config: AgentConfig) -> GitHistory | None:
    """For what goes on from a logged run: only by `git = true`, as the log keeps no --exclude of the run."""
    return history_of(Path(run.directory), config) if run.directory and config.git else None


def _project_python(directory: Path) -> str | None:
    """The project's own; an environment that lies elsewhere, behind a link, is mounted for nobody unasked."""
    environment = directory / ".venv"
    python = environment / "bin" / "python"
    inside = environment.resolve() == directory.resolve() / ".venv"
    return str(python.absolute()) if inside and python.exists() else None
