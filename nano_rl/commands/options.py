"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

jobs_option = click.option(
    "--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes that check tasks."
)
model_option = click.option(
    "--model", help="Checkpoint name, folder, hub id, or openai:NAME with --base-url."
)
log_option = click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
dtype_option = click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
seed_option = click.option("--seed", type=int, default=0, show_default=True)
tasks_option = click.option(
    "--tasks", "tasks_file", type=click.Path(path_type=Path), help="JSON lines file of tasks."
)
tool_option = click.option(
    "--tool", "tools", multiple=True, metavar="NAME|FILE.py:NAME",
    help="One more tool for the agents, installed or in a file; repeatable.",
)  # fmt: skip
reward_option = click.option(
    "--reward",
    help="Parts and weights, tests=1,process=0.2,safety=0.1, or a file of settings (docs/rewards.md).",
)
max_tokens_option = click.option(
    "--max-tokens",
    type=click.IntRange(1),
    metavar="INT",
    help="Of one completion; without it max_completion_tokens of the configuration, which is 256.",
)


class LogName(click.ParamType):  # type: ignore[type-arg]
    """A log where several may be named: the environment names one, whose path may hold spaces."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


def name_option(function: Callable[..., Any]) -> Callable[..., Any]:
    text = "Name of the checkpoint; a training of that name that was stopped goes on."
    return click.option("--name", required=True, help=text)(function)
