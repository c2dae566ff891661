"""Extensions: tools, suites, rewards and others, found by entry point or in a user's file.

An installed package registers its extensions in an entry point group (`nano.tools`, `nano.rewards`, ...); our
own are registered in the same way. `path.py:name` takes a value from a file without installation.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from nano_shared.errors import ConfigError, NanoError

T = TypeVar("T")
Validator = Callable[[Any], str | None]
"""says what is wrong with an extension's value; None where it fits"""
_OURS = ("nano_coder", "nano_rl", "nano_shared")


class Extensions(Mapping[str, T]):
    """The installed extensions of a group by name; each is loaded when it is asked for."""

    def __init__(self, group: str, kind: type[T] | None = None, *, check: Validator | None = None) -> None:
        self.group = group
        self._kind, self._check = kind, check

    def find(self, name: str) -> T:
        """The extension of that name, or the value of `path.py:name`. Raises as `find_extension`."""
        return find_extension(self.group, name, self._kind, check=self._check)

    def source(self, name: str) -> str:
        """The module and the package that register a name; empty if none does."""
        return ", ".join(map(_source, _registered(self.group).get(name, ())))

    def __getitem__(self, name: str) -> T:
        """Raises KeyError for a name that is not installed, and ConfigError as `find` does."""
        if name not in self:
            raise KeyError(name)
        return self.find(name)

    def __contains__(self, name: object) -> bool:
        return name in _registered(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(_registered(self.group))

    def __len__(self) -> int:
        return len(_registered(self.group))


def call_extension(
    function: Callable[..., T],
    *args: object,
    name: str,
    of: object = None,
    passing: tuple[type[Exception], ...] = (),
) -> T:
    """Call an extension's function. What one that is not ours raises is a ConfigError that names it.

    `of` is the object whose code it is, where that is not the function's own; exceptions of `passing` pass.
    """
    module = str((function if of is None else of).__module__)
    try:
        return function(*args)
    except Exception as problem:
        if isinstance(problem, (NanoError, *passing)) or is_ours(module):
            raise
        raise ConfigError(f"{name} ({module}) raised {_error_text(problem)}") from problem


def takes(function: object, *names: str) -> str | None:
    """Why an extension cannot be called with arguments of these names in this order; None where it can."""
    if not callable(function):
        return f"is {described(function)}, and should be a function of ({', '.join(names)})"
    try:
        inspect.signature(function).bind(*names)
    except TypeError as problem:
        return f"is called with ({', '.join(names)}), and takes ({_parameters(function)}): {problem}"
    return None


def _parameters(function: Callable[..., object]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def extension_names(group: str) -> list[str]:
    """Names of the installed extensions of a group, ours first, each part in alphabetical order."""
    return list(_registered(group))


def find_extension(
    group: str, name: str, kind: type[T] | None = None, *, check: Validator | None = None
) -> T:
    """The extension of that name, or the value that `path.py:name` refers to.

    `kind` is the class that the value must be an instance of, `check` any further condition. Raises
    ConfigError for an unknown name, one that two packages register, a file that is not there, code that
    raises when it is imported, and a value of another kind; the message names the source.
    """
    value, source = _from_file(name) if is_file_reference(name) else _from_entry_point(group, name)
    if kind is not None and not isinstance(value, kind):
        raise ConfigError(f"{source} is {described(value)}, and {group} takes values of type {kind.__name__}")
    if problem := check(value) if check else None:
        raise ConfigError(f"{source} {problem}")
    return value  # type: ignore[return-value]


def is_file_reference(name: str) -> bool:
    """Whether a name is `path.py:name`."""
    return name.rpartition(":")[0].endswith(".py")


def is_ours(module: str) -> bool:
    """Whether a module, or an entry point's value, is of this repository's own packages."""
    return module.partition(".")[0] in _OURS


def described(value: object) -> str:
    """What a value is, for a sentence that refuses it."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


@functools.cache
def _registered(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Name -> the entry points of that name: more than one where packages contradict each other."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in entry_points(group=group):
        # a package that is on the path twice is registered twice
        found.setdefault(entry.name, {}).setdefault((entry.value, _package(entry)), entry)
    order = sorted(found, key=lambda name: (not any(is_ours(value) for value, _ in found[name]), name))
    return {name: tuple(found[name].values()) for name in order}


def _from_entry_point(group: str, name: str) -> tuple[object, str]:
    registered = _registered(group)
    if name not in registered:
        raise ConfigError(
            f"{group} has no {name!r}; there are {', '.join(registered) or 'none'}, or path.py:name"
        )
    entry, *others = registered[name]
    if others:
        sources = " and ".join(_source(entry) for entry in registered[name])
        raise ConfigError(f"{group} has several {name!r}: {sources}; uninstall all but one of the packages")
    return _loaded(entry), _source(entry)


@functools.cache
def _loaded(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except NanoError as problem:
        raise ConfigError(f"{_source(entry)}: {problem}") from None
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"{_source(entry)} cannot be loaded: {problem}") from None
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"{_source(entry)} raised {_error_text(problem)} at import") from None


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nano_extension_{path.stem}_{abs(hash(path)):x}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look up their module by name
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except NanoError as problem:
        raise ConfigError(f"{path}: {problem}") from None
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"{path} raised {_error_text(problem)} at import") from None
    return module


def _from_file(name: str) -> tuple[object, str]:
    file, _, attribute = name.rpartition(":")
    path = Path(os.path.realpath(Path(file).expanduser()))
    if not path.is_file():
        raise ConfigError(f"{name}: no such file: {path}")
    module = _module(path)
    if not hasattr(module, attribute):
        known = [n for n, value in vars(module).items() if not n.startswith("_") and _is_of(value, module)]
        raise ConfigError(f"{path} defines no {attribute!r}; it defines {', '.join(known) or 'nothing'}")
    return getattr(module, attribute), f"{path}:{attribute}"


def _is_of(value: object, module: ModuleType) -> bool:
    """Not what the module imported; a value that does not know its module counts."""
    return not isinstance(value, ModuleType) and getattr(value, "__module__", None) in (module.__name__, None)


def _error_text(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def _source(entry: EntryPoint) -> str:
    return f"{entry.value} (package {_package(entry)})"


def _package(entry: EntryPoint) -> str:
    return _name_of(entry.dist) if entry.dist is not None else "unknown"


@functools.cache
def _name_of(package: Distribution) -> str:
    """Its name, which the library parses out of the package's metadata each time."""
    return package.name
