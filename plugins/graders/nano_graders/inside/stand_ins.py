"""What a value shows besides its base value, and stand-ins for objects of the other side.

No behaviour crosses: neither comparisons nor truth values of a class.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from nano_coder.grading.inside.plain_values import ancestors, fields, may_be_sent, standard, tried
from nano_coder.grading.inside.report import LONGEST_NAME

LONGEST_TEXT = 10_000
MOST_ATTRIBUTES = 200
DEEPEST_CLASS = 20
TEXT_KEY = " str"
"""key for an exception's text; attributes cannot have it, for the blank"""


def named_fields(value: Any, kind: type[Any]) -> list[str] | None:
    """Field names of a named tuple; None for another value."""
    names: Any = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    plain = type(names) is tuple and len(names) == tuple.__len__(value) and all(map(may_be_sent, names))
    return list(names) if plain and may_be_sent(kind.__name__) else None


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's readable attributes: its own, and properties and constants of its classes."""
    found = {"name": value.name, "value": value.value} if standard(type(value), "enum", "Enum") else {}
    found = found or fields(value)
    for kind in ancestors(type(value)):
        if kind.__module__ in ("builtins", "enum"):
            continue
        for name, member in list(vars(kind).items()):
            if name in found or not may_be_sent(name):
                continue
            if isinstance(member, property | functools.cached_property | types.MemberDescriptorType):
                found[name] = tried(getattr, value, name)
            elif type(member) in (bool, int, float, str) and not name.startswith("_"):
                found[name] = member
    yield from list(found.items())[:MOST_ATTRIBUTES]


def texts(value: Any) -> list[str | None]:
    """The results of `repr` and `str`, if the class defines them."""
    kind = type(value)
    said = [
        tried(say, value) if getattr(kind, name) is not getattr(object, name) else None
        for name, say in (("__repr__", repr), ("__str__", str))
    ]
    return [text if type(text) is str and len(text) <= LONGEST_TEXT else None for text in said]


# ------------------------------------------------------------------------------------------- stand-ins

_MADE: dict[str, type[Any]] = {}


class About(NamedTuple):
    """Data of a stand-in besides its attributes."""

    handle: int
    texts: list[str | None]
    items: Any


def stand_in(name: str, names: tuple[str, ...], compared: bool, iterates: bool) -> Any:
    """An object of a new class with that name, whose attributes the caller sets.

    If the original class defined equality, stand-ins are equal if their attributes are.
    """
    if not all(map(may_be_sent, (name, *names))):
        raise ValueError("no name")
    import dataclasses  # imported here only: the solution's side does not need it, and it is slow to load

    key = f"{name}({','.join(names)}){compared}{iterates}"
    if key not in _MADE:
        slots = ("_about_", "__dict__", "__weakref__")
        own = {"__repr__": _repr, "__str__": _str, "__module__": "solution", "__slots__": slots}
        methods = {**own, "__iter__": _iter} if iterates else own
        _MADE[key] = dataclasses.make_dataclass(
            name, [(each, object, None) for each in names], eq=compared, order=compared,
            unsafe_hash=compared, init=False, repr=False, namespace=methods,
        )  # fmt: skip
    return object.__new__(_MADE[key])


def is_stand_in(kind: type[Any]) -> bool:
    return kind in _MADE.values() and not issubclass(kind, tuple)


def _repr(self: Any) -> str:
    text: str | None = self._about_.texts[0]
    return text if text is not None else object.__repr__(self)


def _iter(self: Any) -> Iterator[Any]:
    return iter(self._about_.items)


def _str(self: Any) -> str:
    text: str | None = self._about_.texts[1]
    return text if text is not None else repr(self)


def named_tuple(name: str, names: list[str], values: list[Any]) -> Any:
    key = f"{name}[{','.join(names)}]"
    if key not in _MADE:
        _MADE[key] = collections.namedtuple(name, names, rename=True)
    return _MADE[key](*values)


# ---------------------------------------------------------------------------------------------- arrays

_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex128",
)  # fmt: skip


def pack_array(value: Any, kind: type[Any]) -> Any:
    """A tagged array; None for another value."""
    if standard(kind, "array", "array"):
        return {"a": [value.typecode, list(value)]}
    if standard(kind, "numpy", "ndarray") or standard(kind, "numpy", "generic"):
        array = sys.modules["numpy"].asarray(value)
        if str(array.dtype) not in _NUMBERS:
            return None
        flat = array.ravel().tolist()
        if str(array.dtype) == "complex128":
            flat = [[item.real, item.imag] for item in flat]
        return {"A": [str(array.dtype), list(array.shape), flat]}
    return None


def unpack_array(kind: str, shape: list[int], flat: list[Any], *, library: bool) -> Any:
    """The array, if its library is loaded in this process; else the nested list."""
    if kind not in _NUMBERS or type(flat) is not list or type(shape) is not list or len(shape) > 8:
        raise ValueError("no array")
    values = [complex(*item) for item in flat] if kind == "complex128" else flat
    if not all(type(item) in (bool, int, float, complex) for item in values):
        raise ValueError("no numbers")
    numpy = sys.modules.get("numpy")
    if library and numpy is not None:
        made = numpy.array(values, dtype=kind).reshape(shape)
        return made if shape else made[()]
    for size in reversed(shape[1:]):
        if type(size) is not int or size < 1:
            raise ValueError("no shape")
        values = [values[at : at + size] for at in range(0, len(values), size)]
    return values if shape else values[0]


# ------------------------------------------------------------------------------------------ exceptions

_RUNNERS = ("unittest", "doctest", "bdb", "pdb", "pytest", "_pytest", "pluggy", "inside")
"""modules whose exceptions control test runners"""
_CLASSES: dict[str, type[BaseException]] = {}
"""description -> class; `_NODES` is the reverse"""
_NODES: dict[type[BaseException], list[Any]] = {}
_OWN: dict[str, type[BaseException]] = {}
"""exception classes of this side that were sent to the other"""
_DETAILS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def name_of(text: str) -> str:
    """A name as a message may hold it."""
    return text[-LONGEST_NAME:].encode("utf-8", "replace").decode()


def class_node(kind: type[Any], depth: int = 0) -> list[Any]:
    """An exception class by module and name, with its bases."""
    bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
    if kind in _NODES:
        return _NODES[kind]
    if depth > DEEPEST_CLASS:
        return class_node(next(base for base in ancestors(kind) if base.__module__ == "builtins"))
    known = kind.__module__ == "builtins"
    node = [
        name_of(str(kind.__module__)),
        name_of(kind.__qualname__),
        [] if known else [class_node(base, depth + 1) for base in bases],
    ]
    if not known and issubclass(kind, Exception) and not _steers(str(kind.__module__)):
        _OWN[repr(node)] = kind  # under which it comes back
    return node


def exception_class(node: Any, depth: int = 0) -> type[BaseException]:
    """The class itself if it is a builtin, or of the standard library and loaded; else a new one of that
    name."""
    module, name, bases = node
    if type(module) is not str or type(name) is not str or depth > 2 * DEEPEST_CLASS:
        raise ValueError("no class")
    if module == "builtins":
        known: type[BaseException] = getattr(builtins, name)
        if not issubclass(known, BaseException):
            raise TypeError(name)
        return known
    if (found := _of_the_library(module, name)) is not None:
        return found
    key = repr(node)
    if key in _OWN:
        return _OWN[key]
    if key not in _CLASSES:
        made = tuple(exception_class(base, depth + 1) for base in bases) or (Exception,)
        spelt = {"__module__": "solution", "__str__": _error_text, "__qualname__": name}
        try:
            _CLASSES[key] = type(name.rpartition(".")[2], made, spelt)
        except TypeError:  # incompatible bases
            _CLASSES[key] = type(name.rpartition(".")[2], made[:1], spelt)
        _NODES[_CLASSES[key]] = node
    return _CLASSES[key]


def _steers(module: str) -> bool:
    return module.partition(".")[0] in _RUNNERS


def _of_the_library(module: str, name: str) -> type[BaseException] | None:
    """A class of a loaded library module; None for classes that control a test runner or a loop."""
    if module.partition(".")[0] not in sys.stdlib_module_names or _steers(module) or "." in name:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def is_made(kind: Any) -> bool:
    """Whether the class was created here for an exception of the other side."""
    return any(kind is made for made in _CLASSES.values())


def is_error(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def may_come_back(kind: Any) -> bool:
    """Whether the other side may send exceptions of this class."""
    library = is_error(kind) and str(kind.__module__).partition(".")[0] in sys.stdlib_module_names
    return library or is_made(kind)


def _error_text(self: BaseException) -> str:
    given = vars(self).get(TEXT_KEY)
    if given is not None:
        return str(given)
    theirs = next(c for c in type(self).__mro__ if vars(c).get("__str__", _error_text) is not _error_text)
    text: str = vars(theirs)["__str__"](self)
    return text


def details(error: BaseException) -> Iterator[tuple[str, Any]]:
    """An exception's own attributes, and those that builtin exceptions keep besides their arguments."""
    yield from attributes(error)
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and kind is not BaseException:
            for name, member in vars(kind).items():
                if isinstance(member, _DETAILS) and may_be_sent(name) and name not in ("obj", "exceptions"):
                    yield name, getattr(error, name, None)


def make_error(
    kind: type[BaseException], args: list[Any], has: list[tuple[str, Any]], group: list[BaseException]
) -> BaseException:
    """An exception with these arguments and attributes; only its builtin bases get to see them."""
    if issubclass(kind, BaseExceptionGroup):
        args = [str(args[0]) if args else "", group]
    try:
        error = kind.__new__(kind, *args)
    except (TypeError, ValueError):
        return make_error(Exception, args, has, [])
    base: Any = next(c for c in kind.__mro__ if c.__module__ == "builtins")
    with contextlib.suppress(TypeError, ValueError):
        base.__init__(error, *args)
    for name, value in has:
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            setattr(error, name, value)
    return error


def library(name: str) -> types.ModuleType:
    """A module of the standard library. Raises ImportError for other modules, and for those that run code."""
    parts = name.split(".")
    if parts[0] not in sys.stdlib_module_names or any(part.startswith("_") for part in parts):
        raise ImportError(f"{name} is no module of the standard library")
    return importlib.import_module(name)
