"""What both command lines share: lazy commands, one-sentence errors, exit codes, a console."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import rich.console
import typer
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from nano_shared import __version__
from nano_shared.errors import NanoError, UsageError
from nano_shared.printable import GuardedStream, guard_streams, one_line, printable, stdout_for_json

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class Console(rich.console.Console):
    """Style comes from Text and `style=`, never from the contents of a text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    @property
    def file(self) -> IO[str]:
        stream = super().file
        if isinstance(stream, GuardedStream):
            stream.flush()
            return stream.styled
        return stream

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        # before its width is measured
        return super().render_str(printable(text, None), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, None), segment.style)


HELP_NAMES = {"help_option_names": ["-h", "--help"]}
PRINT = "--print-config"
COMMON = frozenset(
    ("-C", "--model", "--temperature", "--tasks", "--env", "--agent", "--task", "--since", "--policy",
     "--sandbox", "--container-image", "--at", "--out", "--log", "--json", "--verbose", "--seed", "--tool",
     "--net", "--limit", "--base-url", "--profile", "--device", "--python", "--agent-folders", "--log-to",
     "--config", "--set", "--by", "--yes", PRINT)
)  # fmt: skip
"""options that many commands share: they stand last in a command's help, in a panel of their own"""
COMMON_PANEL = "Common options"
ALIASES = {
    "--lr": ("--learning-rate",),
    "--batch-size": ("--batch", "--prompts"),
    "--num-epochs": ("--epochs",),
    "--num-train-epochs": ("--epochs",),
    "--max-steps": ("--steps",),
    "--num-generations": ("--group-size",),
    "--rank": ("--lora-rank",),
    "--lora-r": ("--lora-rank",),
    "--kl": ("--beta",),
    "--kl-coef": ("--beta",),
    "--max-tokens": ("--limit max_completion_tokens=N",),
    "--max-new-tokens": ("--limit max_completion_tokens=N",),
    "--max-completion-tokens": ("--limit max_completion_tokens=N",),
    "--max-turns": ("--limit max_turns=N",),
    "--max-cost": ("--limit max_cost=X",),
    "--max-seconds": ("--limit max_seconds=N",),
    "--timeout": ("--limit max_seconds=N", "--timeout"),
    "--dataset": ("--tasks", "--messages", "--pairs"),
    "--data": ("--tasks", "--messages", "--pairs"),
    "--output-dir": ("--name",),
    "--output": ("--out", "--name"),
    "--cwd": ("-C",),
    "--dir": ("-C",),
    "--api-base": ("--base-url",),
    "--url": ("--base-url",),
    "--temp": ("--temperature",),
    "--gpu": ("--device cuda",),
    "--gpus": ("--device cuda",),
    "--num-gpus": ("--device cuda",),
    "--checkpoint": ("--model",),
}
"""what other programs call an option -> what a command may call it; a setting as an option of its name"""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class Command(TyperCommand):
    """A command that answers an unknown option with the nearest option or setting.

    Nothing is required of a command line that only prints the config. An option whose metavar stands in
    brackets, such as `--reflect [N]`, counts as 1 where no value follows.
    """

    settings: Mapping[str, FieldInfo] = {}
    """the settings that --set reaches, by dotted name"""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if PRINT in args:
            for param in self.params:
                param.required = False
        try:
            return super().parse_args(ctx, list(self._completed(args)))
        except typer.TyperException as problem:
            option = getattr(problem, "option_name", "")
            if option and (meant := self._nearest(option)):
                raise UsageError(f"no such option: {option}; did you mean {meant}?") from None
            raise

    def _nearest(self, option: str) -> str | None:
        """What the option is called here, or the nearest name: an option, or the --set of a setting."""
        known = {name: name for param in self.params for name in param.opts}
        for setting in sorted(self.settings, key=lambda name: name.count(".")):
            for name in (setting.rpartition(".")[2], setting):
                word = name.replace("_", "-").replace(".", "-")
                known.setdefault(f"--{word}", f"--set {setting}=...")
                if self.settings[setting].annotation is bool:
                    known.setdefault(f"--no-{word}", f"--set {setting}=false")
        words = (*ALIASES.get(option, ()), option)
        if exact := next((word for word in words if word.split()[0] in known), None):
            return known.get(exact, exact)
        return next((known[name] for name in get_close_matches(option, known, n=1, cutoff=0.7)), None)

    def invoke(self, ctx: Any) -> Any:
        if not gc.isenabled():  # see `run_command`
            gc.freeze()
            gc.enable()
        with stdout_for_json() if ctx.params.get("as_json") else nullcontext():
            return super().invoke(ctx)

    def _completed(self, args: Sequence[str]) -> Iterator[str]:
        short = {o for p in self.params if str(getattr(p, "metavar", "") or "")[:1] == "[" for o in p.opts}
        for place, arg in enumerate(args):
            if arg == "--":
                yield from args[place:]
                return
            alone = place + 1 == len(args) or args[place + 1].startswith("-")
            yield f"{arg}=1" if arg in short and alone else arg


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are called, so that `--help` answers at once.

    A command of an installed package is its entry point `PROGRAM.COMMAND` in the group `nano.commands`.
    """

    targets: ClassVar[dict[str, str]] = {}
    """command -> module, or module:function where the function is not named `command`; `+PLUGIN` for one that
    a plug-in of ours brings"""
    path: ClassVar[str] = ""
    """as nano-rl.tasks, what the names of further commands in `nano.commands` begin with"""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, self.load(stub.name) if stub and stub.name else None, rest

    def load(self, name: str) -> Any:
        """The command itself, instead of the stub that the help and completions list.

        Raises UsageError for one whose plug-in is not installed, and ConfigError as `find_extension`.
        """
        target = self.targets.get(name, "+")
        if target.startswith("+"):
            found = self._of_plugin(name, target[1:])
        else:
            module, _, function = target.partition(":")
            found = getattr(importlib.import_module(module), function or "command")
        return get_command(found) if isinstance(found, typer.Typer) else as_command(name, found)

    def _of_plugin(self, name: str, plugin: str) -> Any:
        from nano_shared.extension_points import extension_names, find_extension, missing_plugin

        entry = f"{self.path}.{name}"
        if plugin and entry not in extension_names("nano.commands"):
            raise missing_plugin(f"`{entry.replace('.', ' ')}`", plugin)
        return find_extension("nano.commands", entry)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or self._further().get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self._further()]

    def _further(self) -> dict[str, TyperCommand]:
        """Stubs of the commands that other packages bring."""
        from nano_shared.extension_points import Extensions

        known = Extensions[Any]("nano.commands")
        names = [name.removeprefix(f"{self.path}.") for name in known if name.startswith(f"{self.path}.")]
        return {
            name: TyperCommand(name, help=f"From {known.source(f'{self.path}.{name}')}.")
            for name in names
            if "." not in name and name not in self.targets
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            with redirect_stdout(sys.stderr):
                print(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # typer makes it the exit code 130, which is also that of a program that `exec` ran
            raise typer.Abort from None


def lazy_app(path: str, commands: Mapping[str, tuple[str, str]], *, help: str) -> typer.Typer:
    """An app of commands, name -> (target as in `LazyGroup`, help): a program's, or a group's within one.

    `path` is the program's name, or `PROGRAM.GROUP`.
    """
    _, _, group = path.partition(".")
    own_path = path

    class Group(LazyGroup):
        targets: ClassVar[dict[str, str]] = {command: target for command, (target, _) in commands.items()}
        path: ClassVar[str] = own_path

        def __init__(self, **attributes: Any) -> None:
            stubs = {command: TyperCommand(command, help=text) for command, (_, text) in commands.items()}
            super().__init__(**{**attributes, "commands": stubs})

    app = typer.Typer(
        name=group or path, cls=Group, help=help, context_settings=HELP_NAMES, add_completion=not group,
    )  # fmt: skip
    app.callback()(_group if group else _program)
    return app


def _say_version(context: typer.Context, requested: bool) -> None:
    if requested:
        print(f"{context.info_name}, version {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
    log: Annotated[str | None, typer.Option(help="Path or SQLAlchemy URL of the log.")] = None,
) -> None:
    if log is not None:
        os.environ["NANO_LOG"] = log


def _group() -> None:
    pass


def as_command(name: str, function: Callable[..., Any]) -> Any:
    """The command that a function with annotated parameters is."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(
        name, cls=Command, context_settings={**HELP_NAMES, **getattr(function, "context_settings", {})}
    )(function)
    command: Any = get_command(app)
    command.settings = getattr(function, "settings", {})
    command.help = _without_markup(inspect.cleandoc(command.help or ""))
    for param in command.params:
        if COMMON.intersection(param.opts):
            param.rich_help_panel = COMMON_PANEL
        param.help = _without_markup(param.help or "")
        described = param.type_descriptor
        kind = (get_args(described.annotation) or (described.annotation,))[0]
        if kind in (str, Path) and described.parameter_info.parser is None:
            # a name need not be UTF-8, and pydantic takes no other text; what is wrong with a path, we say
            described.parameter_info.parser = kind
            param.metavar = param.metavar or (
                "PATH" if kind is Path and param.param_type_name == "option" else None
            )
    command.params.sort(key=lambda param: getattr(param, "rich_help_panel", None) == COMMON_PANEL)
    return command


def emit(result: object, as_json: bool, show: Callable[[], object]) -> None:
    """Print the result of a command: as one line of JSON, or as `show` prints it for people."""
    if as_json:
        print(json.dumps(result, default=_plain))  # which can spell any text
    else:
        show()


def _plain(value: Any) -> Any:
    """A model or a dataclass, as JSON holds it."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else asdict(value)


def _without_markup(text: str) -> str:
    """A text whose brackets rich shows as they are, and whose paragraphs are wrapped by it alone."""
    paragraphs = text.replace("[", r"\[").split("\n\n")
    return "\n\n".join(p.removeprefix("\b\n") if p[:1] == "\b" else " ".join(p.split()) for p in paragraphs)


_ENDING: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL,
}  # fmt: skip
"""signals that end a command, and their handlers in Python"""


@contextmanager
def interrupted_in_time() -> Iterator[None]:
    """Within the block SIGTERM is as Ctrl-C, the second one ends the process, and neither waits for user code
    that hangs in another thread."""
    ours = threading.current_thread() is threading.main_thread()
    # a shell's background job ignores SIGINT
    usual = {number: usual for number, usual in _ENDING.items() if signal.getsignal(number) == usual and ours}

    def handle(number: int, frame: Any) -> None:
        if (extensions := sys.modules.get("nano_shared.extension_points")) is not None:
            extensions.leave_hanging_calls(number)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    for number in usual:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def run_command(
    app: typer.Typer,
    arguments: list[str] | None = None,
    *,
    on_ranks: str | None = None,
) -> None:
    """Run a command line and exit: errors of ours become one line on stderr and their exit code.

    `on_ranks`, MODULE:FUNCTION, is called with the command in each process that torchrun started, and runs it
    in those that are to run it.
    """
    guard_streams()
    gc.disable()  # nothing imported is garbage, and to look for some takes a tenth of a light command
    if on_ranks is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            resolve_name(on_ranks)(lambda: run_command(app, arguments))
            return
        except NanoError as problem:
            _fail(str(problem), problem.exit_code)
    command: Any = get_command(app)
    try:
        with interrupted_in_time():
            result: Any = command.main(args=arguments, prog_name=command.name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except typer.TyperException as problem:
        context = getattr(problem, "ctx", None)
        where = f"; see {context.command_path} --help" if context else ""
        message = " ".join(problem.format_message().replace("Value error, ", "").split())
        _fail(message.rstrip(".") + where, 2)
    except NanoError as problem:
        _fail(str(problem), problem.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as problem:
        if problem.strerror is None:
            raise
        from nano_shared.files import nano_home

        name = "" if problem.filename is None else os.fspath(problem.filename)
        ours = os.path.join(os.fsdecode(name), "").startswith(os.path.join(nano_home(), ""))
        way_out = "; NANO_HOME names another folder for nano's data" if ours else ""
        _fail(f"{f'{name!r}: ' if name else ''}{problem.strerror}{way_out}", 2)
    sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str, code: int) -> None:
    # one line, whatever it quotes; what the user asked to end is no error
    begin = "" if code == 130 else "error: "
    print(f"{begin}{one_line(message, 4000)}", file=sys.stderr)
    sys.exit(code)
