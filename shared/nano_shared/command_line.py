"""The shape both command lines share: lazy commands, one sentence an error, the agreed exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from nano_shared.errors import NanoError
from nano_shared.printable import guard_streams, one_line


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
