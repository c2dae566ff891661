"""Settings of a pydantic model: from TOML and `name=value`, as options of a command, and written as TOML."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, update_wrapper
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from nano_shared.command_line import ALIASES, PRINT
from nano_shared.errors import ConfigError, NanoError, UsageError
from nano_shared.process import parse

NONE = "none"
"""how a setting without a value is written, in a file and on the command line"""
M = TypeVar("M", bound=BaseModel)


class Config(BaseModel):
    """Base of settings: frozen, with no unknown names and no infinite or NaN numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


# ------------------------------------------------------------------------------------- fields


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types a value may have: those of a union, or the one there is."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for part in get_args(annotation) for kind in alternatives(part))
    return (annotation,)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model that a field holds, where it holds one."""
    kinds = alternatives(field.annotation)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def takes_none(field: FieldInfo) -> bool:
    """Whether `none` stands for no value: not where it is a value itself."""
    kinds = alternatives(field.annotation)
    values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return NoneType in kinds and NONE not in values


@cache
def _describe(kind: type[BaseModel]) -> None:
    """Give each field the docstring below it. pydantic reads the sources for that whenever it is imported."""
    for base in kind.__mro__[: kind.__mro__.index(BaseModel)]:
        with suppress(OSError, TypeError):  # made by no `class` statement
            (made,) = parse(textwrap.dedent(inspect.getsource(base))).body
            for field, below in pairwise(getattr(made, "body", ())):
                match field, below:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        if described := kind.model_fields.get(name):
                            described.description = described.description or inspect.cleandoc(text)


def setting_fields(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its dotted name, sections after what is in them."""
    _describe(kind)
    for name, field in kind.model_fields.items():
        section = section_of(field)
        if section is not None:
            yield from setting_fields(section, f"{prefix}{name}.")
        yield prefix + name, field


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The setting that was probably meant: the same word in another section, or the nearest spelling."""
    last = name.rpartition(".")[2]
    elsewhere = [k for k in known if k.rpartition(".")[2] == last]
    spelt = get_close_matches(name, known, n=1, cutoff=0.7)
    words = {k.rpartition(".")[2]: k for k in known}
    near = get_close_matches(last, words, n=1, cutoff=0.7)
    return next(iter([*elsewhere, *spelt, *(words[w] for w in near)]), None)


def no_such_setting(name: str, kind: type[BaseModel]) -> str:
    """The sentence about an unknown setting, with the nearest known one.

    A kind whose commands read settings of another kind too has a method `elsewhere`, which says of a name
    where that is set, if it is one of those.
    """
    elsewhere = getattr(kind, "elsewhere", None)
    if elsewhere is not None and (problem := elsewhere(name)):
        return f"{name}: {problem}"
    known = [known for known, _ in setting_fields(kind)]
    others = [word[2:].replace("-", "_") for word in ALIASES.get(f"--{name.replace('_', '-')}", ())]
    meant = next(filter(None, (nearest(word, known) for word in (*others, name))), None)
    return f"{name}: no such setting" + (f"; did you mean {meant}?" if meant else "")


# ------------------------------------------------------------------------------------- reading


def parse_config(kind: type[M], values: Mapping[str, Any]) -> M:
    """A config from plain values. Raises ConfigError with one line for each value that is wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("\n".join(text for _, text in wrong_settings(error, kind))) from error


def wrong_settings(error: ValidationError, kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """For each wrong value: its dotted name, empty where several go ill together, and what is wrong."""
    for each in error.errors():
        name = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "missing":
            yield name, f"{name}: is required"
        elif each["type"] == "extra_forbidden":
            yield name, no_such_setting(name, kind)
        elif not name or isinstance(each["input"], Mapping):
            yield name, message  # it names the settings
        elif inside := [known for known, _ in setting_fields(kind) if known.startswith(f"{name}.")]:
            yield name, f"{name} = {each['input']!r}: {name} is no setting; it holds {', '.join(inside)}"
        else:
            yield name, f"{name} = {each['input']!r}: {message.partition(', unable to')[0]}"


def parse_toml(text: str, kind: type[M]) -> M:
    """A config from TOML. Raises ConfigError for settings that are wrong, UsageError for what is no TOML."""
    return parse_config(kind, over_defaults(kind, settings_in(text, kind)))


def read_settings(path: Path, kind: type[BaseModel]) -> dict[str, Any]:
    """The settings of a TOML file as plain values, not yet checked. Raises UsageError where it is none."""
    try:
        return settings_in(path.read_text(encoding="utf-8"), kind)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}; --print-config writes one that works") from None
    except (OSError, UnicodeDecodeError, UsageError) as problem:
        raise UsageError(f"cannot read {path}: {problem}") from None


def settings_in(text: str, kind: type[BaseModel]) -> dict[str, Any]:
    """The settings that a TOML text holds, as plain values. Raises UsageError for what is no TOML."""
    try:
        return _with_none(tomllib.loads(text), kind)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise UsageError(f"it is no TOML: {problem}") from None


def _with_none(values: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in values.items():
        field = kind.model_fields.get(name)
        section = section_of(field) if field else None
        if section is not None and isinstance(value, Mapping):
            read[name] = _with_none(value, section)
        else:
            read[name] = None if field and value == NONE and takes_none(field) else value
    return read


def assigned(name: str, value: Any, kind: type[BaseModel]) -> dict[str, Any]:
    """The nested values of one setting by its dotted name, a text read by the type of the setting.

    Raises UsageError for a name that is no setting.
    """
    path = name.split(".")
    field = _find(path, kind)
    if field is None:
        raise UsageError(no_such_setting(name, kind))
    if isinstance(value, str):
        value = _plain_value(value, field)
    for part in reversed(path):
        value = {part: value}
    nested: dict[str, Any] = value
    return nested


def _find(path: Sequence[str], kind: type[BaseModel]) -> FieldInfo | None:
    field = kind.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field
    section = section_of(field)
    if section is not None:
        return _find(path[1:], section)
    is_table = any(get_origin(k) is dict or k is dict for k in alternatives(field.annotation))
    return FieldInfo(annotation=Any) if is_table and all(path) else None


def _plain_value(text: str, field: FieldInfo) -> Any:
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    if text == NONE and takes_none(field):
        return None
    if str in kinds:
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    if any(get_origin(kind) in (tuple, list) for kind in kinds) and not isinstance(value, list):
        return [part.strip() for part in text.split(",") if part.strip()]
    return value


def over_defaults(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each section laid over the default that `kind` gives it rather than over its class's own.

    TrainConfig's learning rate is not OptimizerConfig's; to set another schedule must leave it as it is.
    """
    whole = dict(values)
    for name, field in kind.model_fields.items():
        given = whole.get(name)
        if isinstance(field.default, BaseModel) and isinstance(given, Mapping):
            whole[name] = merged(field.default.model_dump(exclude_defaults=True), given)
    return whole


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, those of `above` winning."""
    both = dict(below)
    for name, value in above.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


# ------------------------------------------------------------------------------------- writing


def to_toml(config: BaseModel) -> str:
    """The whole config as TOML, from which `parse_toml` makes the same one.

    Raises ConfigError for an open table (the settings of a reward's part) that holds a null.
    """
    import tomli_w

    return tomli_w.dumps(_written(config, ""))


def _written(config: BaseModel, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            values[name] = _written(value, f"{prefix}{name}.")
        elif value is not None:
            values[name] = _without_null(config.model_dump(mode="json", include={name})[name], prefix + name)
        elif takes_none(field):
            values[name] = NONE
    return values


def _without_null(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(f"{name}: TOML cannot write null; leave the setting out")
    if isinstance(value, dict):
        return {key: _without_null(inner, f"{name}.{key}") for key, inner in value.items()}
    return [_without_null(inner, name) for inner in value] if isinstance(value, list) else value


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
        if not equals or not name:
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
