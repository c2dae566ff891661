"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from nano_coder.commands.options import Log

__all__ = [
    "DeviceOption", "DtypeOption", "EnvOption", "Log", "ModelOption", "NameOption",
    "RewardOption", "Seed", "TaskFile", "Tasks",
]  # fmt: skip

TaskFile = Annotated[Path, Argument(metavar="FILE", help="JSON lines of tasks.")]
ModelOption = Annotated[
    str | None, Option(help="Checkpoint name, folder, hub id, or openai:NAME with --base-url.")
]
DeviceOption = Annotated[
    str | None,
    Option(metavar="auto|cpu|cuda|cuda:N", help="Where the model trains.", show_default="auto"),
]
DtypeOption = Annotated[Literal["float32", "bfloat16"], Option(help="Of the arithmetic.")]
Seed = Annotated[int, Option(help="The same one repeats the random choices.")]
Tasks = Annotated[Path | None, Option("--tasks", help="JSON lines file of tasks.")]
RewardOption = Annotated[
    str | None,
    Option(help="Parts and weights, tests=1,process=0.2, or a file of settings (docs/training.md#rewards)."),
]
EnvOption = Annotated[
    list[str] | None,
    Option(
        "--env", metavar="ENV",
        help="Tasks, tools and rewards of others: verifiers:NAME, nemo-gym:URL, openenv:URL or FILE.py:NAME,"
        " with limits of its runs behind it; repeatable (docs/extending.md#an-environment).",
    ),
]  # fmt: skip
NameOption = Annotated[
    str, Option(help="Name of the checkpoint; a training of that name that was stopped goes on.")
]
