"""`--limit NAME=VALUE`: one option for all limits, which every command has that executes."""

from __future__ import annotations

from typing import Any

import click
from pydantic import ValidationError

from nano_shared.types import Limits, Sampling

LIMITS = {
    "max_turns": "max_turns",
    "max_seconds": "max_seconds",
    "max_run_tokens": "max_tokens",
    "tool_seconds": "tool_seconds",
    "tool_memory_mb": "memory_mb",
    "tool_output_bytes": "output_bytes",
}
"""setting -> the limit of a task that it sets"""
COMPLETION = "max_completion_tokens"
"""the limit of one answer of the model, which no task has"""


def _parsed(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """The settings, checked: they are read as the configuration is."""
    limits: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in (*LIMITS, COMPLETION):
            raise click.BadParameter(
                f"{text!r} is no NAME=VALUE; the names are {', '.join((*LIMITS, COMPLETION))}"
            )
        try:
            if name == COMPLETION:
                limits[name] = Sampling.model_validate({"max_tokens": value}).max_tokens
            else:
                limits[name] = getattr(Limits.model_validate({LIMITS[name]: value}), LIMITS[name])
        except ValidationError as problem:
            raise click.BadParameter(f"{text}: {problem.errors()[0]['msg'].lower()}") from None
    return limits


limit_option = click.option(
    "--limit",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parsed,
    help=f"A limit in place of the task's own; repeatable: {', '.join((*LIMITS, COMPLETION))}.",
)
