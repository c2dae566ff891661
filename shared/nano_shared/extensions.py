"""Extensions: tools, suites, rewards and the like, found by entry point or in a file of the user's.

An installed package names what it adds in an entry point group (`nano.tools`, `nano.rewards`, ...); our own
are registered in the same way. `path.py:name` takes a value out of a file without installing anything.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from nano_shared.errors import ConfigError

T = TypeVar("T")
Check = Callable[[object], str | None]
"""says what an extension's value should be, where it is something else; None where it fits"""


def extension_names(group: str) -> list[str]:
    """Names of the installed extensions of a group, ours first, then in alphabetical order.

    Raises ConfigError where two packages register one name.
    """
    return list(_registered(group))


def find_extension(group: str, name: str, kind: type[T] | None = None, *, check: Check | None = None) -> T:
    """The extension of that name, or the value that `path.py:name` names.

    `kind` is the class that the value must be an instance of, `check` any further condition. Raises
    ConfigError for an unknown name, a file that is not there, code that raises when it is imported, and a
    value of another kind; the message names the source.
    """
    value, source = _from_file(name) if is_file_reference(name) else _from_entry_point(group, name)
    if kind is not None and not isinstance(value, kind):
        raise ConfigError(f"{source} is a {type(value).__name__}, and {group} takes a {kind.__name__}")
    if problem := check(value) if check else None:
        raise ConfigError(f"{source}: {problem}")
    return value  # type: ignore[return-value]


def is_file_reference(name: str) -> bool:
    """Whether a name is `path.py:name`."""
    return name.rpartition(":")[0].endswith(".py")


@functools.cache
def _registered(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if (other.value, _package(other)) != (entry.value, _package(entry)):
            raise ConfigError(
                f"two extensions of {group} are called {entry.name!r}: {_source(other)} and {_source(entry)};"
                " uninstall one of the two packages"
            )
    own = {name: entry for name, entry in found.items() if entry.value.startswith("nano_")}
    return own | dict(sorted((name, entry) for name, entry in found.items() if name not in own))


def _from_entry_point(group: str, name: str) -> tuple[object, str]:
    registered = _registered(group)
    if name not in registered:
        raise ConfigError(f"{group} has no {name!r}; there are {', '.join(registered)}, or path.py:name")
    source = _source(registered[name])
    try:
        return registered[name].load(), source
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"{source} cannot be loaded: {problem}") from None
    except Exception as problem:
        raise ConfigError(f"{source} raised {type(problem).__name__} at import: {problem}") from None


@functools.cache
def _from_file(name: str) -> tuple[object, str]:
    file, _, attribute = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{name}: no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"nano_extension_{path.stem}_{abs(hash(path)):x}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{name}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickles look their module up by name
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise ConfigError(f"{path} raised {type(problem).__name__} at import: {problem}") from None
    if not hasattr(module, attribute):
        known = ", ".join(n for n in vars(module) if not n.startswith("_"))
        raise ConfigError(f"{path} defines no {attribute!r}; it defines {known}")
    return getattr(module, attribute), f"{path}:{attribute}"


def _source(entry: EntryPoint) -> str:
    return f"{entry.value} (package {_package(entry)})"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"
