"""Plain values for objects that are not plain data.

An instance of a subclass becomes its exact base value, by the base's own methods; any other object becomes
its plain attributes. No behaviour crosses: neither comparisons nor truth values of its class.
"""

from __future__ import annotations

import collections
import datetime
import keyword
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from .report import LONGEST_NAME


class NotPlain(Exception):
    """The value is not plain data."""


# ---------------------------------------------------------------------------------- down to the base

_WHOLE = slice(None)
_BASES: dict[type[Any], Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, _WHOLE),
    bytearray: lambda value: bytearray.__getitem__(value, _WHOLE),
    list: lambda value: list.__getitem__(value, _WHOLE),
    tuple: lambda value: tuple.__getitem__(value, _WHOLE),
    set: set.copy,
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value)),
    collections.Counter: lambda value: _filled(collections.Counter(), value),
    collections.OrderedDict: lambda value: _filled(collections.OrderedDict(), value),
    collections.defaultdict: lambda value: _filled(collections.defaultdict(), value),
    dict: lambda value: dict(dict.items(value)),
    collections.UserList: lambda value: list(value.data),
    collections.UserDict: lambda value: dict(value.data),
    collections.UserString: lambda value: str(value.data),
    collections.ChainMap: lambda value: dict(collections.ChainMap.items(value)),
    types.MappingProxyType: lambda value: dict(value),
    memoryview: lambda value: bytes(value),
    datetime.datetime: lambda value: datetime.datetime.fromisoformat(datetime.datetime.isoformat(value)),
    datetime.date: lambda value: datetime.date.fromisoformat(datetime.date.isoformat(value)),
    datetime.time: lambda value: datetime.time.fromisoformat(datetime.time.isoformat(value)),
    datetime.timedelta: datetime.timedelta.__pos__,
}
_STANDARD: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("numpy", "generic"): lambda value: value.dtype.type.item(value),
    ("decimal", "Decimal"): lambda value: sys.modules["decimal"].Decimal(value),
    ("fractions", "Fraction"): lambda value: sys.modules["fractions"].Fraction(*value.as_integer_ratio()),
}
"""classes of modules that may not be loaded; if not, there are no instances either"""


def _filled(mapping: Any, value: Any) -> Any:
    dict.update(mapping, dict.items(value))
    return mapping


def standard(kind: type[Any], module: str, name: str) -> bool:
    """Whether this is a class of a library, or a subclass of one."""
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and issubclass(kind, found)


def base_value(value: Any) -> Any:
    """The base value of an instance of a subclass. Raises NotPlain if there is none."""
    kind = type(value)
    try:
        for (module, name), carry in _STANDARD.items():
            if standard(kind, module, name):
                return _of_another_type(carry(value), kind)
        for base in ancestors(kind):
            if base in _BASES:
                return _of_another_type(_BASES[base](value), kind)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        raise NotPlain(kind.__name__) from problem
    raise NotPlain(kind.__name__)


def has_base(kind: type[Any]) -> bool:
    return any(base in _BASES for base in ancestors(kind)) or any(standard(kind, *each) for each in _STANDARD)


def ancestors(kind: type[Any]) -> tuple[type[Any], ...]:
    """The type's bases as the interpreter sees them, whatever the class claims."""
    ancestors: tuple[type[Any], ...] = type.__dict__["__mro__"].__get__(kind)
    return ancestors


def has_method(kind: type[Any], name: str) -> bool:
    """Whether a class other than `object` defines the method."""
    return any(name in vars(each) for each in ancestors(kind) if each is not object)


def _of_another_type(value: Any, kind: type[Any]) -> Any:
    if type(value) is kind:
        raise NotPlain(kind.__name__)
    return value


def as_json(value: Any, kind: type[Any]) -> Any:
    """A number or array as JSON: equal to the value or the nearest; None for other values."""
    if standard(kind, "numpy", "ndarray") or standard(kind, "array", "array"):
        return kind.tolist(value)
    if standard(kind, "fractions", "Fraction"):
        return int(value) if value.denominator == 1 else float(value)
    if standard(kind, "decimal", "Decimal"):
        return int(value) if value.as_tuple().exponent in range(1000) else float(value)
    return None


def tried(call: Callable[..., Any], *args: Any) -> Any:
    """The result of the call; None if it raises: foreign code may raise anything."""
    try:
        return call(*args)
    except Exception:
        return None


def deceives(value: Any) -> bool:
    """Whether comparisons of the type lie: equal to an object that nobody has seen before, for one."""
    kind = type(value)
    number = int.from_bytes(os.urandom(6), "big")
    token = f"{number:x}"
    unseen = (object(), number, token, number / 7, [token], (token,), {token: 0}, {token})

    def says(question: Callable[[Any, Any], Any], other: Any, expected_result: Any = True) -> bool:
        answer = tried(question, value, other)
        return type(answer) in (bool, int) and answer == expected_result

    if any(says(operator.eq, other) or says(operator.ne, other, False) for other in unseen):
        return True
    both = ((operator.lt, operator.gt), (operator.le, operator.ge))
    if any(says(less, other) and says(more, other) for less, more in both for other in unseen):
        return True
    holds = has_method(kind, "__contains__") and says(operator.contains, object())
    if holds or (kind is not object and says(lambda _, other: isinstance(other, kind), object())):
        return True
    if says(lambda v, _: v.__class__ is kind, None, False):
        return True
    scalar = next((base for base in (int, float, str, bytes, complex) if issubclass(kind, base)), None)
    return scalar is not None and says(lambda v, _: bool(v) is bool(_BASES[scalar](v)), None, False)


# ------------------------------------------------------------------------------------ plain attributes


def is_object(value: Any) -> bool:
    """Whether the value is an instance of a user-defined class with readable attributes."""
    root = str(getattr(type(value), "__module__", "")).partition(".")[0]
    return root not in sys.stdlib_module_names and hasattr(object, "__getstate__")


def may_be_sent(name: Any) -> bool:
    """Whether a stand-in may get an attribute of this name."""
    return (
        type(name) is str
        and len(name) <= LONGEST_NAME
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and not (name.startswith("__") and name.endswith("__") and name != "__notes__")
    )


def fields(value: Any) -> dict[str, Any]:
    """An object's own attributes: from its dictionary and slots."""
    state: Any = vars(value) if type(value) is types.SimpleNamespace else object.__getstate__(value)
    known, slots = state if type(state) is tuple else (state, None)
    own = {**(known or {}), **(slots or {})}
    return {name: own[name] for name in own if may_be_sent(name)}
