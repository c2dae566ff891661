"""Command line options made from a config: name, type, bounds, default and help of each of its fields."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import annotated_types
import click
from click.core import ParameterSource
from pydantic.fields import FieldInfo

from nano_rl.config.toml_file import (
    NONE,
    alternatives,
    merged,
    over_defaults,
    read_settings,
    section_of,
    takes_none,
    to_toml,
)
from nano_rl.config.training import parse_config
from nano_rl.learn.config import Config
from nano_shared.errors import ConfigError, UsageError

C = TypeVar("C", bound=Config)
PRINT = "--print-config"
_OTHER = "Other"
_METAVARS: dict[type, str] = {click.IntRange: "INT", click.FloatRange: "FLOAT"}
"""in place of INTEGER RANGE, which leaves the help no room"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Generic[C]):
    """What a command was told, by file and flags: nested plain values, not yet judged."""

    kind: type[C]
    values: dict[str, Any]
    flags: frozenset[str]
    """dotted names that were given as flags"""
    shown: bool
    """whether the user asked to see the config instead of the command's work"""

    def over(self, below: Mapping[str, Any]) -> Settings[C]:
        """The same, over other values than the defaults (those of a training that is resumed)."""
        values = merged(below, self.values)
        return Settings(kind=self.kind, values=values, flags=self.flags, shown=self.shown)

    def config(self, more: Mapping[str, Any] | None = None) -> C:
        """The config, with what the command itself decides on top.

        With --print-config this prints it as TOML and ends the command. Raises ConfigError for values that
        cannot work, and UsageError where flags were among them.
        """
        try:
            config = parse_config(self.kind, over_defaults(self.kind, merged(self.values, more or {})))
        except ConfigError as error:
            told = "; ".join(str(error).splitlines())  # errors are printed as one line
            raise (UsageError(told) if self.flags else ConfigError(told)) from error
        if self.shown:
            click.echo(to_toml(config), nl=False)
            raise click.exceptions.Exit(0)
        return config


@dataclass(frozen=True, slots=True)
class Setting:
    """One field, however deep, and the option that sets it."""

    path: tuple[str, ...]
    field: FieldInfo
    default: Any
    option: str
    """without its dashes"""

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def parameter(self) -> str:
        return "__".join(self.path)


def config_options(
    kind: type[Config], *, aliases: Mapping[str, Sequence[str]] | None = None, apart: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for each field of `kind`, --config FILE and --print-config.

    The command gets them as one argument, `settings: Settings[kind]`, and calls `settings.config()`. A field
    of a section is called by its own name where no field before it has that name, and with the section in
    front of it otherwise. `aliases` adds names (`prompts_per_step` -> `--prompts`); the fields `apart` get no
    option, because the command has one of its own for them.
    """
    found = [s for s in settings_of(kind) if s.path[0] not in apart]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(*args: Any, config_file: Path | None, print_config: bool, **given: Any) -> Any:
            context = click.get_current_context()
            values = read_settings(config_file, kind) if config_file else {}
            flags = set()
            for setting in found:
                told = given.pop(setting.parameter, None)
                if context.get_parameter_source(setting.parameter) is ParameterSource.COMMANDLINE:
                    values = merged(values, _nested(setting.path, told))
                    flags.add(setting.dotted)
            chosen = Settings(kind=kind, values=values, flags=frozenset(flags), shown=print_config)
            return function(*args, settings=chosen, **given)

        decorated: Callable[..., Any] = command
        for setting in reversed(found):
            option = _option(setting, (aliases or {}).get(setting.dotted, ()))
            decorated = option(decorated) if option else decorated
        return _file_options(decorated)

    return decorate


def _file_options(function: Callable[..., Any]) -> Callable[..., Any]:
    file = click.option(
        "--config", "config_file", type=click.Path(path_type=Path), help="Settings, as TOML; flags win."
    )
    shown = click.option(PRINT, is_flag=True, help="Print the settings that would be used, and end.")
    return file(shown(function))


def settings_of(kind: type[Config]) -> list[Setting]:
    """Every field that is no section, in order; those nearer the top choose their names first."""
    fields = list(_fields(kind, (), None))
    names: dict[str, tuple[str, ...]] = {}
    for path, _, _ in sorted(fields, key=lambda each: len(each[0])):
        short = path[-1].replace("_", "-")
        names["-".join(path).replace("_", "-") if short in names else short] = path
    options = {path: name for name, path in names.items()}
    return [Setting(path, field, default, options[path]) for path, field, default in fields]


def _fields(
    kind: type[Config], prefix: tuple[str, ...], defaults: Config | None
) -> Iterator[tuple[tuple[str, ...], FieldInfo, Any]]:
    for name, field in kind.model_fields.items():
        default = getattr(defaults, name) if defaults else field.get_default(call_default_factory=True)
        section = section_of(field)
        if section is None:
            yield (*prefix, name), field, default
        else:
            yield from _fields(section, (*prefix, name), default if isinstance(default, Config) else None)


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _option(setting: Setting, aliases: Sequence[str]) -> Callable[..., Any] | None:
    type_ = parameter_type(setting.field)
    if type_ is None:
        return None
    name = f"--{setting.option}"
    default = setting.default.value if isinstance(setting.default, Enum) else setting.default
    declared = f"{name}/--no-{setting.option}" if type_ is click.BOOL else name
    return click.option(
        *aliases,
        declared,
        setting.parameter,
        type=type_,
        metavar=_METAVARS.get(type(type_)),
        default=None if setting.field.is_required() else default,
        show_default=default is not None and type_ is not click.BOOL,
        help=_help(setting.field, type_),
    )


def _help(field: FieldInfo, type_: click.ParamType[Any]) -> str:
    """The docstring as a sentence, and the bounds where click does not write them itself."""
    text = _sentence(field.description or "")
    hidden = isinstance(type_, OrNone) and isinstance(type_.inner, click.IntRange | click.FloatRange)
    return f"{text}  [{type_.inner._describe_range()}]" if hidden else text  # type: ignore[attr-defined]


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return f"{text[0].upper()}{text[1:]}{'' if text[-1] in '.!?' else '.'}" if text else ""


def parameter_type(field: FieldInfo) -> click.ParamType[Any] | None:
    """How a field is written on a command line; None for what only a file can say (tables)."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    if len(kinds) != 1:
        return None
    inner = _one_type(kinds[0], field)
    if inner is not None and NoneType in alternatives(field.annotation):
        return OrNone(inner) if takes_none(field.annotation) else inner
    return inner


def _one_type(kind: Any, field: FieldInfo) -> click.ParamType[Any] | None:
    if get_origin(kind) is Literal:
        return Pick(get_args(kind))
    if get_origin(kind) in (tuple, list):
        items = [a for a in get_args(kind) if a is not Ellipsis]
        inner = _one_type(items[0], FieldInfo(annotation=items[0])) if len(items) == 1 else None
        return Several(inner) if inner else None
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Enum):
        return Pick([member.value for member in kind])
    if kind is bool:
        return click.BOOL
    if kind in (int, float):
        return _number(kind, field)
    return click.STRING if kind in (str, Path) else None


def _number(kind: type, field: FieldInfo) -> click.ParamType[Any]:
    bounds: dict[str, Any] = {}
    for rule in field.metadata:
        if isinstance(rule, annotated_types.Gt | annotated_types.Ge):
            strict = isinstance(rule, annotated_types.Gt)
            bounds |= {"min": rule.gt if strict else rule.ge, "min_open": strict}  # type: ignore[union-attr]
        if isinstance(rule, annotated_types.Lt | annotated_types.Le):
            strict = isinstance(rule, annotated_types.Lt)
            bounds |= {"max": rule.lt if strict else rule.le, "max_open": strict}  # type: ignore[union-attr]
    if not bounds:
        return click.INT if kind is int else click.FLOAT
    if kind is float:
        return click.FloatRange(**bounds)
    # whole numbers have closed ranges only
    if bounds.pop("min_open", False):
        bounds["min"] += 1
    if bounds.pop("max_open", False):
        bounds["max"] -= 1
    return click.IntRange(**bounds)


class OrNone(click.ParamType):  # type: ignore[type-arg]
    """A value, or `none`."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner
        self.name = f"{inner.name}|{NONE}"

    def get_metavar(self, param: click.Parameter, *args: Any, **kwargs: Any) -> str:
        inner = self.inner.get_metavar(param, *args, **kwargs) or self.inner.name.split()[0].upper()
        return f"{inner}|{NONE}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value == NONE else self.inner.convert(value, param, ctx)


class Pick(click.Choice):  # type: ignore[type-arg]
    """One of some values, whatever their type, by how they are written."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__([str(value) for value in values])
        self.values = {str(value): value for value in values}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.values[super().convert(str(value), param, ctx)]


class Several(click.ParamType):  # type: ignore[type-arg]
    """Values with commas between them."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner
        self.name = f"{inner.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        items = value.split(",") if isinstance(value, str) else value
        return [self.inner.convert(i.strip() if isinstance(i, str) else i, param, ctx) for i in items if i]


class ConfigCommand(click.Command):
    """A command whose help groups its options under headings, and that needs nothing to print its config.

    `headings` maps a heading to the names under it: parameters of the command, fields, or whole sections.
    """

    def __init__(self, *args: Any, headings: Mapping[str, Sequence[str]] | None = None, **more: Any) -> None:
        super().__init__(*args, **{"context_settings": {"max_content_width": 110}, **more})
        self.headings = headings or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[PRINT] = PRINT in args
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        return [_optional(p) for p in params] if ctx.meta.get(PRINT) else params

    def heading(self, parameter: str) -> str:
        """Where an option stands in the help; a name goes before the section that it is in."""
        section = parameter.split("__")[0]
        for name in (parameter, section):
            for heading, names in self.headings.items():
                if name in names:
                    return heading
        if "__" in parameter:
            return section.replace("_", " ").capitalize()
        return _OTHER if self.headings else "Options"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self.headings}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and param.name:
                groups.setdefault(self.heading(param.name), []).append(record)
        for last in (_OTHER, "Options"):
            if last in groups:
                groups[last] = groups.pop(last)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=34)


def _optional(param: click.Parameter) -> click.Parameter:
    relaxed = copy.copy(param)
    relaxed.required = False
    return relaxed
