"""Options made of settings: a flag for those that people turn, --config and --set for all of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from nano_shared.command_line import PRINT
from nano_shared.errors import ConfigError, NanoError, UsageError
from nano_shared.settings import (
    alternatives,
    assigned,
    merged,
    over_defaults,
    read_settings,
    setting_fields,
    to_toml,
    wrong_settings,
)

M = TypeVar("M", bound=BaseModel)
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings, as TOML.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One setting, over those of the file; repeatable."),
]
PrintConfig = Annotated[bool, typer.Option(PRINT, help="Print all settings as TOML, and end.")]


@dataclass(frozen=True, slots=True)
class Settings(Generic[M]):
    """The settings given by --config, --set and flags, as nested plain values."""

    kind: type[M]
    values: dict[str, Any]
    sources: Mapping[str, str]
    """dotted name -> the flag, `--set`, or the file that it comes from"""
    print_only: bool = False
    """True with --print-config: print the settings instead of running the command"""

    @property
    def flags(self) -> frozenset[str]:
        """Dotted names that were given on the command line."""
        return frozenset(name for name, source in self.sources.items() if source.startswith("-"))

    def over(self, below: Mapping[str, Any]) -> Settings[M]:
        """The same, over other values than the defaults (those of a training that is resumed)."""
        return replace(self, values=merged(below, self.values))

    def config(self, more: Mapping[str, Any] | None = None) -> M:
        """The config, with what the command itself decides on top; --print-config prints it and ends here.

        Raises UsageError for values of the command line that cannot work, ConfigError for those of a file.
        """
        try:
            config = self.kind.model_validate(over_defaults(self.kind, merged(self.values, more or {})))
        except ValidationError as error:
            raise self._wrong(error) from error
        if self.print_only:
            self.show(config)
        return config

    def show(self, config: BaseModel) -> None:
        """Print a config as TOML and end the command."""
        typer.echo(to_toml(config), nl=False)
        raise typer.Exit(0)

    def _wrong(self, error: ValidationError) -> NanoError:
        problems, ours = [], False
        for name, text in wrong_settings(error, self.kind):
            source = next((s for n, s in self.sources.items() if f"{n}.".startswith(f"{name}.")), "")
            problems.append(f"{source}: {text}" if name and source else text)
            ours |= source.startswith("-") or (not (name and source) and bool(self.flags))
        return (UsageError if ours else ConfigError)("; ".join(problems))


def settings_options(
    kind: type[BaseModel],
    flags: Mapping[str, Sequence[str]],
    *,
    names: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command --config FILE, --set NAME=VALUE, --print-config, and a flag for some settings of `kind`.

    `flags` maps a panel of the help to dotted names; `names` gives a setting's option another name. The
    command gets `settings: Settings[kind]`.
    """
    fields = dict(setting_fields(kind))
    options = {
        setting: (names or {}).get(setting, "--" + setting.rpartition(".")[2].replace("_", "-"))
        for settings in flags.values()
        for setting in settings
    }
    parameters = [
        inspect.Parameter(
            _parameter(setting),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_option(setting, fields[setting], options[setting], heading, kind),
        )
        for heading, settings in flags.items()
        for setting in settings
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        own = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, each in signature.parameters.items()
            if name != "settings"
        ]

        def command(
            *,
            config_file: ConfigFile = None,
            assignments: Assignments = None,
            print_config: PrintConfig = False,
            **arguments: Any,
        ) -> Any:
            flags = {option: (name, arguments.pop(_parameter(name))) for name, option in options.items()}
            values, sources = _given_values(kind, config_file, assignments or (), flags)
            return function(**arguments, settings=Settings(kind, values, sources, print_config))

        common = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        update_wrapper(command, function)
        command.__dict__["__signature__"] = signature.replace(parameters=[*own, *parameters, *common])
        command.__dict__["settings"] = fields
        return command

    return decorate


def _given_values(
    kind: type[BaseModel], file: Path | None, texts: Sequence[str], flags: Mapping[str, tuple[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The nested values, flags over --set over the file, and where each came from.

    `flags` maps an option to its setting and what was given, if anything. Raises UsageError.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        values = read_settings(file, kind)
        sources = dict.fromkeys(_dotted(values), str(file))
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UsageError(f"--set {text}: write NAME=VALUE; {PRINT} lists the names")
        try:
            values = merged(values, assigned(name, value, kind))
        except UsageError as problem:
            raise UsageError(f"--set: {problem}") from None
        sources[name] = "--set"
    for option, (name, value) in flags.items():
        if value not in (None, []):
            values = merged(values, assigned(name, value, kind))
            sources[name] = option
    return values, sources


def _parameter(setting: str) -> str:
    return setting.replace(".", "__")


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")


def _option(setting: str, field: FieldInfo, option: str, panel: str, kind: type[BaseModel]) -> Any:
    """The option of one setting. Its text is checked with the other settings, in `Settings.config`."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    more: dict[str, Any] = {"rich_help_panel": panel, "help": _help(setting, field, kind)}
    if kinds == [bool]:
        return Annotated[bool | None, typer.Option(f"{option}/--no-{option[2:]}", **more)]
    if any(get_origin(each) in (tuple, list) for each in kinds):
        return Annotated[list[str] | None, typer.Option(option, metavar="TEXT", **more)]
    if get_origin(kinds[0]) is Literal:
        metavar = "|".join(map(str, get_args(kinds[0])))
    else:
        metavar = {int: "INT", float: "FLOAT"}.get(kinds[0], "TEXT")
    return Annotated[str | None, typer.Option(option, metavar=metavar, **more)]


def _help(setting: str, field: FieldInfo, kind: type[BaseModel]) -> str:
    """The docstring of the setting as a sentence, its bounds and its default."""
    text = " ".join((field.description or "").split())
    text = f"{text[:1].upper()}{text[1:]}{'' if text[-1:] in '.!?' else '.'}"
    bounds = "".join(
        f" {sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(rule, name)
    )
    default: Any = kind()
    for part in setting.split("."):
        default = getattr(default, part, None)
    notes = [bounds.strip()] if bounds else []
    notes += [f"default: {default}"] if default not in (None, False, ()) else []
    return f"{text} ({', '.join(notes)})" if notes else text
