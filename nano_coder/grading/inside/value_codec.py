"""Packs Python values as JSON for the connection between two jails, and unpacks them with their types.

A subclass instance is sent as its base value, a function or an iterator as a number by which it is called,
and other objects not at all, so nothing received has behaviour of the sender's. Mutable containers are
numbered in the order of their appearance, equally on both sides: a container that was sent before is sent as
its number, and changes that a call made to its arguments can be sent back.
"""

from __future__ import annotations

import base64
import builtins
import collections
import contextlib
import copy
import datetime
import importlib
import operator
from collections.abc import Callable
from typing import Any

from . import plain_values
from .plain_values import NotPlain as NotPlain

DEEPEST = 120
MANY = 200
"""most keys with one hash in one container"""
LONGEST_INT = 12_000
"""bits; longer integers are sent in base 16, which takes linear time"""
_FUNCTIONS = (
    "function", "builtin_function_or_method", "method", "method_descriptor", "wrapper_descriptor", "partial",
    "itemgetter", "attrgetter", "methodcaller", "_lru_cache_wrapper",
)  # fmt: skip
_SCALARS = frozenset({type(None), bool, int, float, str})
_VIEWS = {type({}.keys()): "K", type({}.values()): "V", type({}.items()): "I"}
_DAY, _HOUR = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
_MOMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "date": (datetime.date, _DAY), "time": (datetime.time, _HOUR),
    "datetime": (datetime.datetime, (*_DAY, *_HOUR)),
}  # fmt: skip
_MUTABLE = (
    list, dict, set, bytearray, collections.deque, collections.OrderedDict, collections.defaultdict,
    collections.Counter,
)  # fmt: skip
_MAPPINGS: dict[str, type[Any]] = {
    "d": dict, "O": collections.OrderedDict, "E": collections.defaultdict, "C": collections.Counter,
}  # fmt: skip
_MAPPING_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}
_TEXTUAL = {
    ("decimal", "Decimal"), ("uuid", "UUID"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"), ("ipaddress", "IPv4Address"), ("ipaddress", "IPv6Address"),
    ("ipaddress", "IPv4Network"), ("ipaddress", "IPv6Network"),
}  # fmt: skip
"""types that are sent as text"""
LENT = ("N", "F")
"""tags of what stays on its side and is used through a proxy: iterators and functions"""
MALFORMED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError, MemoryError,
)  # fmt: skip
"""exceptions that reading a malicious message may raise"""


class Crossing:
    """The values of one message and its answer, with the containers seen so far."""

    def __init__(
        self,
        lend: Callable[[Any, str], int] | None = None,
        borrow: Callable[[int, str], Any] | None = None,
        *,
        carry: bool = False,
    ) -> None:
        """`lend` numbers a function or other `LENT` object of ours for use by the other side; `borrow`
        creates a proxy for one of theirs. `carry`: instances of subclasses are sent as base values, and
        arrays as lists."""
        self._lend = lend
        self._borrow = borrow
        self._carry = carry
        self.deceit: str | None = None
        """name of a class whose comparisons lie, if one was seen"""
        self._examined: set[type[Any]] = set()
        self._met: list[Any] = []
        self._number: dict[int, int] = {}

    # ------------------------------------------------------------------------------------ packing

    def pack(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON data. Raises NotPlain."""
        kind = type(value)
        if kind in _SCALARS:
            return {"i": hex(value)} if kind is int and value.bit_length() > LONGEST_INT else value
        if depth > DEEPEST:
            raise NotPlain("something nested too deeply")
        if kind in _MUTABLE:
            return self._numbered(value) or self._contents(value, depth + 1)
        if kind is tuple:
            return {"t": self._items(value, depth + 1)}
        return self._pack_rare(value, kind, depth + 1)

    def _items(self, values: Any, depth: int) -> list[Any]:
        return [self.pack(item, depth) for item in values]

    def _pairs(self, values: Any, depth: int) -> list[Any]:
        return [[self.pack(key, depth), self.pack(item, depth)] for key, item in values]

    def _contents(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, depth)
        if kind in _MAPPING_TAGS:
            return {_MAPPING_TAGS[kind]: self._pairs(dict.items(value), depth)}
        if kind is set:
            return {"s": self._items(value, depth)}
        if kind is bytearray:
            return {"B": base64.b64encode(value).decode()}
        return {"q": [value.maxlen, self._items(value, depth)]}

    def _pack_rare(self, value: Any, kind: type[Any], depth: int) -> Any:
        if kind is frozenset:
            return {"f": self._items(value, depth)}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        if kind is range or kind is slice:
            parts = self._items((value.start, value.stop, value.step), depth)
            return {"g" if kind is range else "l": parts}
        if kind in _VIEWS:
            values = self._pairs(value, depth) if _VIEWS[kind] == "I" else self._items(value, depth)
            return {_VIEWS[kind]: values}
        if value is Ellipsis or value is NotImplemented:
            return {"S": str(value)}
        if kind is datetime.timedelta:
            return {"D": [value.days, value.seconds, value.microseconds]}
        for name, (moment, named) in _MOMENTS.items():
            if kind is moment:
                return {"M": [name, [getattr(value, part) for part in named], *_zone(value)]}
        if kind is type and value in _TYPE_NAMES:
            return {"T": _TYPE_NAMES[value]}
        if plain_values.standard(kind, "fractions", "Fraction") and kind.__name__ == "Fraction":
            return {"Y": str(value)}
        if (kind.__module__, kind.__name__) in _TEXTUAL:
            return {"X": [kind.__module__, kind.__name__, str(value)]}
        return self._pack_made(value, kind, depth)

    def _pack_made(self, value: Any, kind: type[Any], depth: int) -> Any:
        """An exception, its class, a function or an iterator; or the base value of another."""
        if isinstance(value, BaseException):
            return {"e": self.pack_error(value, depth)}
        if plain_values.may_come_back(value) or (self._carry and plain_values.is_error(value)):
            return {"Q": plain_values.class_node(value)}
        if self._lend is not None and (tag := _lent_as(kind)) is not None:
            return {tag: self._lend(value, tag)}
        if not self._carry:
            raise NotPlain(kind.__name__)
        if (numbers := plain_values.array_items(value, kind)) is not None:
            return self.pack(numbers, depth)
        if kind not in self._examined:  # each class once
            self._examined.add(kind)
            if plain_values.deceives(value):
                self.deceit = kind.__name__
        plain = plain_values.base_value(value)
        if type(plain) not in _MUTABLE:
            return self.pack(plain, depth)
        return self._numbered(value) or self._contents(plain, depth)

    def _numbered(self, value: Any) -> Any:
        """The number of a container that was seen before; assigns one to a new container."""
        number = self._number.get(id(value))
        if number is None:
            self._meet(value)
            return None
        return {"r": number}

    def pack_error(self, error: BaseException, depth: int = 0) -> dict[str, Any]:
        """An exception: class, arguments, its own attributes as far as they are plain data, and text."""
        try:
            args = self._items(error.args, depth + 1)
        except NotPlain:
            args = [plain_values.tried(str, error) or ""]
        has = []
        for name, attribute in list(plain_values.fields(error).items())[:MANY]:
            with contextlib.suppress(NotPlain):
                has.append([name, self.pack(attribute, depth + 1)])
        text = plain_values.tried(str, error)
        said = type(text) is str and len(text) <= plain_values.LONGEST_TEXT
        of = plain_values.class_node(type(error))
        return {"of": of, "args": args, "has": has, "text": text if said else None}

    def _meet(self, value: Any) -> None:
        self._number[id(value)] = len(self._met)
        self._met.append(value)

    # ---------------------------------------------------------------------------------- unpacking

    def unpack(self, node: Any, depth: int = 0) -> Any:
        """The value of JSON data. Raises one of MALFORMED for data that `pack` never creates."""
        kind = type(node)
        if kind in _SCALARS:
            return node
        if depth > 2 * DEEPEST:
            raise ValueError("nested too deeply")
        if kind is list:
            values: list[Any] = []
            self._meet(values)
            for item in node:
                # appended item by item, as copy.deepcopy does: published tests use sys.getsizeof
                values.append(self.unpack(item, depth + 1))
            return values
        ((tag, payload),) = node.items()
        return self._unpack_tagged(tag, payload, depth + 1)

    def _unpack_tagged(self, tag: str, payload: Any, depth: int) -> Any:
        if tag == "r":
            return self._met[payload]
        if tag == "t":
            return tuple([self.unpack(item, depth) for item in payload])
        if tag in _MAPPINGS:
            mapping = _MAPPINGS[tag]()
            self._meet(mapping)
            mapping.update(self._mapping(payload, depth))
            return mapping
        if tag == "s":
            members: set[Any] = set()
            self._meet(members)
            members.update(_spread([self.unpack(item, depth) for item in payload]))
            return members
        if tag == "q":
            queue: collections.deque[Any] = collections.deque(maxlen=payload[0])
            self._meet(queue)
            queue.extend([self.unpack(item, depth) for item in payload[1]])
            return queue
        if tag == "B":
            data = bytearray(base64.b64decode(payload))
            self._meet(data)
            return data
        return self._unpack_rare(tag, payload, depth)

    def _unpack_rare(self, tag: str, payload: Any, depth: int) -> Any:
        if tag == "i":
            return int(payload, 16)
        if tag == "b":
            return base64.b64decode(payload)
        if tag == "c":
            return complex(*payload)
        if tag == "D":
            return datetime.timedelta(*payload)
        if tag == "M":
            return _moment(*payload)
        if tag == "S":
            return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[payload]
        if tag == "T":
            return _TYPES[payload]
        if tag == "Y":
            from fractions import Fraction

            # its text could be a decimal number whose exponent would be expanded
            above, _, below = payload.partition("/")
            return Fraction(int(above), int(below or "1"))
        if tag == "X":
            module, name, text = payload
            if (module, name) not in _TEXTUAL or type(text) is not str:
                raise ValueError("no such class")
            return getattr(importlib.import_module(module), name)(text)
        if tag == "e":
            return self.unpack_error(payload, depth)
        if tag == "Q":
            return plain_values.exception_class(payload)
        if tag in LENT:
            if self._borrow is None:
                raise ValueError("nothing is lent here")
            return self._borrow(payload, tag)
        if tag == "I":
            return self._mapping(payload, depth).items()
        values = [self.unpack(item, depth) for item in payload]
        makers: dict[str, Callable[[], Any]] = {
            "f": lambda: frozenset(_spread(values)),
            "g": lambda: range(*values),
            "l": lambda: slice(*values),
            "K": lambda: dict.fromkeys(_spread(values)).keys(),
            "V": lambda: dict(enumerate(values)).values(),
        }
        return makers[tag]()

    def _mapping(self, pairs: Any, depth: int) -> dict[Any, Any]:
        unpacked = [(self.unpack(key, depth), self.unpack(value, depth)) for key, value in pairs]
        _spread([key for key, _ in unpacked])
        return dict(unpacked)

    def unpack_error(self, payload: Any, depth: int = 0) -> BaseException:
        """Raises one of MALFORMED."""
        if self._borrow is None:
            raise ValueError("no exception")
        kind = plain_values.exception_class(payload["of"])
        args = [self.unpack(node, depth + 1) for node in payload["args"]]
        if not all(plain_values.may_be_sent(name) for name, _ in payload["has"]):
            raise ValueError("no name of an attribute")
        has = [(name, self.unpack(node, depth + 1)) for name, node in payload["has"]]
        error = plain_values.make_error(kind, args, has)
        if type(text := payload["text"]) is str and plain_values.is_made(type(error)):
            vars(error)[plain_values.TEXT_KEY] = text
        return error

    # ------------------------------------------------------------------------------------ changes

    def remember(self) -> list[list[Any]]:
        """The current contents of every container seen."""
        return [_items_of(value) for value in self._met]

    def changes(self, before: list[list[Any]]) -> list[Any]:
        """The containers whose contents differ from `before`: [number, contents] each."""
        return [
            [number, self._contents(value, 1)]
            for number, (value, contents) in enumerate(zip(self._met[: len(before)], before, strict=True))
            if _differs(_items_of(value), contents)
        ]

    def detach(self) -> None:
        """Replace the containers by copies, so that later changes do not reach the originals."""
        with contextlib.suppress(TypeError):  # generators cannot be copied
            self._met = copy.deepcopy(self._met)

    def apply(self, changes: Any) -> None:
        """Give our containers the contents of theirs. Raises one of MALFORMED."""
        count = len(self._met)
        pairs = []
        for number, node in changes:
            if not 0 <= number < count:
                raise ValueError("no such container")
            pairs.append((self._met[number], self._fresh(node)))
        for ours, theirs in pairs:
            _refill(ours, theirs)

    def _fresh(self, node: Any) -> Any:
        """The contents of a container that has its number already; wrappers around them get none."""
        before = len(self._met)
        if isinstance(node, list):
            return [self.unpack(item, 1) for item in node]
        ((tag, payload),) = node.items()
        if tag in _MAPPINGS:
            return self._mapping(payload, 1)
        if tag == "s":
            return set(_spread([self.unpack(item, 1) for item in payload]))
        if tag == "q":
            return [self.unpack(item, 1) for item in payload[1]]
        if tag == "B" and len(self._met) == before:
            return base64.b64decode(payload)
        raise ValueError(f"no container: {tag!r}")


def _zone(value: Any) -> tuple[Any, ...]:
    """Offset from UTC in microseconds and fold, so that no zone of the solution's is asked again."""
    if type(value) is datetime.date:
        return ()
    offset = value.utcoffset()
    return (None if offset is None else offset // datetime.timedelta(microseconds=1), value.fold)


def _moment(name: str, parts: list[int], offset: int | None = None, fold: int = 0) -> Any:
    kind, names = _MOMENTS[name]
    if kind is datetime.date:
        return kind(*parts)
    zone = None if offset is None else datetime.timezone(datetime.timedelta(microseconds=offset))
    return kind(**dict(zip(names, parts, strict=True)), tzinfo=zone, fold=fold)


def _lent_as(kind: type[Any]) -> str | None:
    if kind.__name__ in _FUNCTIONS:
        return "F"
    return "N" if plain_values.has_method(kind, "__next__") else None


def _spread(keys: list[Any]) -> list[Any]:
    """Keys of a set or mapping. Raises ValueError if many collide, which would cost hours."""
    if len(keys) > MANY and collections.Counter(map(hash, keys)).most_common(1)[0][1] > MANY:
        raise ValueError("keys of one hash")
    return keys


def _items_of(value: Any) -> list[Any]:
    """The items of a container, in order, for comparison by identity."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    return list(value)


def _differs(now: list[Any], before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def _refill(ours: Any, contents: Any) -> None:
    if isinstance(ours, list | bytearray):
        if isinstance(contents, dict | set):
            raise TypeError("a container became another")
        ours[:] = contents
        return
    if isinstance(ours, dict) != isinstance(contents, dict):
        raise TypeError("a container became another")
    ours.clear()
    if isinstance(ours, collections.deque):
        ours.extend(contents)
    else:
        dict.update(ours, contents) if isinstance(ours, dict) else ours.update(contents)
