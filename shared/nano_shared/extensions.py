"""Extensions: tools, suites, rewards and others, found by entry point or in a user's file.

An installed package registers its extensions in an entry point group (`nano.tools`, `nano.rewards`, ...); our
own are registered in the same way. `path.py:name` and `module:name` take a value without installation.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from nano_shared.durable import real_path
from nano_shared.errors import ConfigError, NanoError, UsageError
from nano_shared.user_code import OURS, error_text, note_source, raised_at, result_of, user_code

T = TypeVar("T")
PLUGINS = {
    group: {name: plugin for plugin, names in brought.items() for name in names.split()}
    for group, brought in {
        "nano.blob_stores": {"cluster": "s3 gs az"},
        "nano.environments": {"formats": "nemo-gym verifiers"},
        "nano.learners": {"cluster": "ranks"},
        "nano.log_databases": {"cluster": "postgresql"},
        "nano.rewards": {
            "preferences": "process format length diff_size lint reasoning safety judge constitution"
            " preference human"
        },
        "nano.run_formats": {"formats": "atif nemo-gym claude-code codex"},
        "nano.sandboxes": {"containers": "bwrap podman"},
        "nano.settings": {"mcp": "mcp"},
        "nano.suites": {"suites": "functions shell sql data logic search perceive plan memory reasoning-gym"},
        "nano.task_formats": {"formats": "harbor nemo-gym swe-bench humaneval mbpp rows verifiers trl"},
        "nano.terms": {"preferences": "preferences"},
        "nano.workers": {"cluster": "ray"},
    }.items()
}
"""group -> an extension of ours that the core's wheel does not hold -> the plug-in that does"""
Validator = Callable[[Any], str | None]
"""says what is wrong with an extension's value; None where it fits"""


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
    function: Callable[..., Any],
    *args: object,
    name: str,
    of: object = None,
    passing: tuple[type[Exception], ...] = (),
    error: type[NanoError] = ConfigError,
    seconds: float | None = None,
    **named: object,
) -> Any:
    """Call an extension's function, as `user_code` does; one that is `async` is awaited.

    `of` is the object whose code it is, where that is not the function's own. What code that is not ours
    raises becomes an `error` with its name, file and line; exceptions of `passing`, and TimeoutError after
    `seconds`, pass.
    """
    module = str(getattr(function if of is None else of, "__module__", ""))
    if is_ours(module):
        return function(*args, **named)
    try:
        with user_code(name):
            return result_of(function, *args, seconds=seconds, **named)
    except (Exception, SystemExit) as problem:
        late = seconds is not None and isinstance(problem, TimeoutError)
        if late or isinstance(problem, (NanoError, *passing)):
            raise
        raise error(f"{name} raised {error_text(problem)}{raised_at(problem)}") from problem


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

    def problem_of(value: object) -> str | None:
        if kind is not None and not isinstance(value, kind):
            return f"is {described(value)}, and {group} takes values of type {kind.__name__}"
        return check(value) if check else None

    if is_reference(name) and name not in _registered(group):
        value, source = find_in_module(name, problem_of)
    else:
        value, source = _from_entry_point(group, name)
    if problem := problem_of(value):
        raise ConfigError(f"{source} {problem}")
    return value  # type: ignore[no-any-return]


_SCHEMES = ("nano.models", "nano.environments", "nano.suites", "nano.rewards")
"""groups whose names are followed by an argument, NAME:ARGUMENT"""
_MODULE_NAME = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")


def is_reference(name: str) -> bool:
    """Whether a name is `path.py:name`, or `module:name` of a module that Python finds from here."""
    if name.rpartition(":")[0].endswith(".py"):
        return True
    named = _MODULE_NAME.fullmatch(name)
    if named is None or any(name.partition(":")[0] in _registered(group) for group in _SCHEMES):
        return False
    return PathFinder.find_spec(named[1], [os.getcwd(), *sys.path]) is not None


def absolute_reference(name: str) -> str:
    """The reference with an absolute path, so that it holds in other folders; other names as they are."""
    file, _, attribute = name.rpartition(":")
    return f"{real_path(file)}:{attribute}" if file.endswith(".py") else name


def refuse_missing(group: str, name: str) -> None:
    """Raises UsageError if a plug-in of ours that is not installed brings this extension of a group."""
    if name not in _registered(group) and (plugin := PLUGINS.get(group, {}).get(name)):
        raise missing_plugin(f"{name!r}", plugin)


def missing_plugin(what: str, plugin: str) -> UsageError:
    """For what a plug-in of ours brings, where that is not installed."""
    return UsageError(
        f"{what} comes with the plug-in {plugin}, which is not installed here;"
        f" pip install 'nano-rl-coder[{plugin}]'"
    )


def is_ours(module: str) -> bool:
    """Whether a module, or an entry point's value, is of this repository's own packages."""
    return module.partition(".")[0] in OURS


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
        refuse_missing(group, name)
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
        if is_ours(entry.value):
            return entry.load()
        with user_code(_source(entry)):
            return entry.load()
    except NanoError as problem:
        raise ConfigError(f"{_source(entry)}: {problem}") from None
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"{_source(entry)} cannot be loaded: {problem}") from None
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"{_source(entry)} raised {error_text(problem)} at import") from None


def user_module(name: str) -> ModuleType:
    """A module of users: of a file `path.py`, or by its name, also from the current folder.

    Raises ConfigError for one that is not there, and for what it raises when it is imported, with the line.
    """
    if not name.endswith(".py"):
        return _imported(name)
    path = real_path(name)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return _module(path)


def _imported(name: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with _importing(f"{name}:"):
        module = importlib.import_module(name)
    if module.__file__:
        note_source(real_path(module.__file__))
    return module


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nano_extension_{path.stem}_{abs(hash(path)):x}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look up their module by name
    sys.modules[spec.name] = module
    note_source(path)
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # last, so that what lies beside it takes no module's place
    with _importing(str(path)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing(source: str) -> Iterator[None]:
    """Code of users is imported within the block. Raises ConfigError for what it raises."""
    try:
        with user_code(source):
            yield
    except NanoError as problem:
        raise ConfigError(f"{source.removesuffix(':')}: {problem}{raised_at(problem)}") from None
    except ModuleNotFoundError as problem:
        raise ConfigError(f"{source} cannot import {problem.name}: {problem}{raised_at(problem)}") from None
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"{source} raised {error_text(problem)} at import{raised_at(problem)}") from None


def find_in_module(reference: str, fits: Validator) -> tuple[Any, str]:
    """(value, where it is) of `path.py:name` or `module:name`.

    Raises ConfigError as `user_module`, and for a name that is not there, with those whose values fit: the
    nearest first. The value itself is not checked.
    """
    file, _, attribute = reference.rpartition(":")
    module = user_module(file)
    source = str(real_path(file)) if file.endswith(".py") else file
    if not hasattr(module, attribute):
        known = [n for n, value in vars(module).items() if _is_offered(n, value, module) and not fits(value)]
        near = get_close_matches(attribute, known, n=len(known) or 1)
        listed = ", ".join([*near, *(name for name in known if name not in near)])
        raise ConfigError(
            f"{source} defines no {attribute!r}; "
            + (f"what fits there is {listed}" if listed else "nothing in it fits")
        )
    return getattr(module, attribute), f"{source}:{attribute}"


def _is_offered(name: str, value: object, module: ModuleType) -> bool:
    """Not what is private, and no class or function that the module imported."""
    defined = isinstance(value, type) or inspect.isroutine(value)
    return not name.startswith("_") and (not defined or value.__module__ == module.__name__)


def _source(entry: EntryPoint) -> str:
    return f"{entry.value} (package {_package(entry)})"


def _package(entry: EntryPoint) -> str:
    return _name_of(entry.dist) if entry.dist is not None else "unknown"


@functools.cache
def _name_of(package: Distribution) -> str:
    """Its name, which the library parses out of the package's metadata each time."""
    return package.name
