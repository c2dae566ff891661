"""The shape both command lines share: lazy commands, one sentence an error, the agreed exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click
from pydantic import ValidationError

from nano_shared.errors import NanoError
from nano_shared.printable import guard_streams, one_line
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


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that `--help` answers at once."""

    def __init__(
        self, name: str, commands: Mapping[str, tuple[str, str]], *, help: str, version: str | None = None
    ):
        super().__init__(name, help=help, context_settings={"help_option_names": ["-h", "--help"]})
        self._lazy = dict(commands)
        if version:
            click.version_option(version, prog_name=name)(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _ = self._lazy[cmd_name]
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])


def run_command(cli: click.Command, arguments: list[str] | None = None) -> None:
    """Run a command line and exit: errors of ours become one line on stderr and their exit code."""
    guard_streams()
    try:
        result: Any = cli.main(args=arguments, standalone_mode=False)
    except click.exceptions.Abort:
        _fail("interrupted", 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except click.UsageError as problem:
        if isinstance(problem, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
            problem.show()
            sys.exit(2)
        where = f"; see {problem.ctx.command_path} --help" if problem.ctx else ""
        _fail(problem.format_message().rstrip(".") + where, 2)
    except click.ClickException as problem:
        _fail(problem.format_message(), 2)
    except NanoError as problem:
        _fail(str(problem), problem.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as problem:
        if problem.strerror is None:
            raise
        about = f"{os.fspath(problem.filename)!r}: " if problem.filename is not None else ""
        _fail(f"{about}{problem.strerror}", 2)
    sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str, code: int) -> None:
    # one line, whatever it quotes; what the user asked to end is no error
    begin = "" if code == 130 else "error: "
    print(f"{begin}{one_line(message, 4000)}", file=sys.stderr)
    sys.exit(code)
