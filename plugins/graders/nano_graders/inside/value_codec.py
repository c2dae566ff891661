"""Packs Python values as JSON for the connection between two jails, and unpacks them with their types.

A subclass instance is sent as its base value, and another object as its plain attributes, so nothing received
has behaviour of the sender's. Mutable containers are numbered in the order of their appearance, equally on
both sides: a container that was sent before is sent as its number, and changes that a call made to its
arguments can be sent back.
"""

from __future__ import annotations

import array
import base64
import builtins
import collections
import contextlib
import copy
import datetime
import importlib
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from nano_coder.grading.inside import plain_values
from nano_coder.grading.inside.plain_values import NotPlain as NotPlain

from . import stand_ins

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
LENT = {"N": "__next__", "J": "__iter__", "F": "__call__"}
"""objects that stay on their side and are used through a proxy, by the method that identifies them"""
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
        creates a proxy for one of theirs. `carry`: other values that are not plain data are sent as base
        values or attributes."""
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
        """A value that the other side recreates, by a library class or a new one."""
        if isinstance(value, BaseException):
            return {"e": self.pack_error(value, depth)}
        if stand_ins.may_come_back(value) or (self._carry and stand_ins.is_error(value)):
            return {"Q": stand_ins.class_node(value)}
        if kind is types.ModuleType:
            return {"L": str(value.__name__)}
        if kind is types.SimpleNamespace:
            return {
                "p": [
                    [name, self.pack(attribute, depth)]
                    for name, attribute in plain_values.fields(value).items()
                ]
            }
        if stand_ins.is_stand_in(kind):
            return {"h": value._about_.handle}
        if (names := stand_ins.named_fields(value, kind)) is not None:
            self._examine(value, kind)
            return {"n": [kind.__name__, names, self._items(tuple.__iter__(value), depth)]}
        # numpy scalars of the solution become numbers; those of tests keep their type
        number = self._carry and plain_values.standard(kind, "numpy", "generic")
        if not number and (numbers := stand_ins.pack_array(value, kind)) is not None:
            return numbers
        if self._lend is not None and (tag := _lent_as(kind)) is not None:
            return {tag: self._lend(value, tag)}
        if not self._carry:
            raise NotPlain(kind.__name__)
        return self._pack_carried(value, kind, depth)

    def _pack_carried(self, value: Any, kind: type[Any], depth: int) -> Any:
        """A subclass's base value; or an object as a proxy or its attributes."""
        self._examine(value, kind)
        if plain_values.has_base(kind):
            plain = plain_values.base_value(value)
            if type(plain) not in _MUTABLE:
                return self.pack(plain, depth)
            return self._numbered(value) or self._contents(plain, depth)
        if self._lend is None or isinstance(value, type):
            raise NotPlain(kind.__name__)
        if plain_values.has_method(kind, LENT["F"]):
            return {"F": self._lend(value, "F")}
        if kind is not object and not plain_values.is_object(value):
            raise NotPlain(kind.__name__)
        return self._numbered(value) or self._pack_object(value, kind, depth)

    def _numbered(self, value: Any) -> Any:
        """The number of a container that was seen before; assigns one to a new container."""
        number = self._number.get(id(value))
        if number is None:
            self._meet(value)
            return None
        return {"r": number}

    def _pack_object(self, value: Any, kind: type[Any], depth: int) -> Any:
        assert self._lend is not None
        items = self._lend(value, "J") if plain_values.has_method(kind, LENT["J"]) else None
        compared = plain_values.has_method(kind, "__eq__")
        name = kind.__name__ if plain_values.may_be_sent(kind.__name__) else "Object"
        about = [name, compared, stand_ins.texts(value), self._lend(value, "h"), items]
        return {"R": [*about, self._readable(stand_ins.attributes(value), depth)]}

    def _readable(self, attributes: Iterator[tuple[str, Any]], depth: int) -> list[Any]:
        """Attributes, without those that are not plain data."""
        packed = []
        for name, attribute in attributes:
            with contextlib.suppress(NotPlain):
                packed.append([name, self.pack(attribute, depth)])
        return packed

    def pack_error(self, error: BaseException, depth: int = 0) -> dict[str, Any]:
        """An exception: class, arguments, attributes, text, and its cause and context."""
        try:
            args = self._items(error.args, depth + 1)
        except NotPlain:
            args = [plain_values.tried(str, error) or ""]
        if depth > DEEPEST:
            return {"of": stand_ins.class_node(type(error)), "args": args}
        around = {name: getattr(error, name) for name in ("__cause__", "__context__")}
        return {
            "of": stand_ins.class_node(type(error)),
            "args": args,
            "has": self._readable(stand_ins.details(error), depth + 1),
            "text": stand_ins.texts(error)[1],
            "around": {n: self.pack_error(e, depth + 20) for n, e in around.items() if e is not None},
            "group": [self.pack_error(each, depth + 10) for each in _members(error)],
        }

    def _examine(self, value: Any, kind: type[Any]) -> None:
        """Record a class whose comparisons lie; each class is examined once."""
        if kind not in self._examined:
            self._examined.add(kind)
            if plain_values.deceives(value):
                self.deceit = kind.__name__

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
        if tag in _MADE:
            return _MADE[tag](self, payload, depth)
        if tag in LENT or tag == "h":
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

    def _textual(self, payload: Any, depth: int) -> Any:
        module, name, text = payload
        if (module, name) not in _TEXTUAL or type(text) is not str:
            raise ValueError("no such class")
        return getattr(importlib.import_module(module), name)(text)

    def _numbers(self, payload: Any, depth: int) -> Any:
        if self._carry:  # tests pass an array even if the solution has not loaded numpy yet
            with contextlib.suppress(ImportError):
                importlib.import_module("numpy")
        return stand_ins.unpack_array(*payload, library=self._borrow is not None)

    def _namespace(self, payload: Any, depth: int) -> Any:
        return types.SimpleNamespace(**dict(self._attributes(payload, depth)))

    def _attributes(self, payload: Any, depth: int) -> list[tuple[str, Any]]:
        if not all(plain_values.may_be_sent(name) for name, _ in payload):
            raise ValueError("no name of an attribute")
        return [(name, self.unpack(node, depth)) for name, node in payload]

    def _named_tuple(self, payload: Any, depth: int) -> Any:
        name, names, nodes = payload
        values = [self.unpack(node, depth) for node in nodes]
        return tuple(values) if self._borrow is None else stand_ins.named_tuple(name, names, values)

    def _object(self, payload: Any, depth: int) -> Any:
        """A stand-in with the object's attributes; sent back, it becomes the object itself."""
        name, compared, texts, handle, items, attributes = payload
        if (
            self._borrow is None
            or type(handle) is not int
            or not all(type(t) in (str, type(None)) for t in texts)
        ):
            raise ValueError("no object")
        names = tuple(name for name, _ in attributes)
        made = stand_ins.stand_in(name, names, bool(compared), items is not None)
        self._meet(made)
        iterable = None if items is None else self._borrow(items, "J")
        made._about_ = stand_ins.About(handle, [texts[0], texts[1]], iterable)
        vars(made).update(self._attributes(attributes, depth))
        return made

    def unpack_error(self, payload: Any, depth: int = 0) -> BaseException:
        """Raises one of MALFORMED."""
        if self._borrow is None or depth > 4 * DEEPEST:
            raise ValueError("no exception")
        kind = stand_ins.exception_class(payload["of"])
        args = [self.unpack(node, depth + 1) for node in payload["args"]]
        has = self._attributes(payload.get("has", []), depth + 1)
        group = [self.unpack_error(node, depth + 10) for node in payload.get("group", ())]
        error = stand_ins.make_error(kind, args, has, group)
        if type(text := payload.get("text")) is str and stand_ins.is_made(type(error)):
            vars(error)[stand_ins.TEXT_KEY] = text
        around = payload.get("around", {})
        for name in around.keys() & {"__cause__", "__context__"}:
            setattr(error, name, self.unpack_error(around[name], depth + 20))
        return error

    def _error_class(self, payload: Any, depth: int) -> type[BaseException]:
        return stand_ins.exception_class(payload)

    def _module(self, payload: Any, depth: int) -> types.ModuleType:
        if self._borrow is None:
            raise ValueError("no module")
        return stand_ins.library(str(payload))

    def _array(self, payload: Any, depth: int) -> Any:
        kind, values = payload
        if kind not in tuple("bBhHiIlLqQfd") or not all(type(item) in (int, float) for item in values):
            raise ValueError("no array")
        return array.array(kind, values)

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


_MADE: dict[str, Callable[[Crossing, Any, int], Any]] = {
    "X": Crossing._textual, "A": Crossing._numbers, "a": Crossing._array, "p": Crossing._namespace,
    "n": Crossing._named_tuple, "R": Crossing._object, "e": Crossing.unpack_error, "Q": Crossing._error_class,
    "L": Crossing._module,
}  # fmt: skip


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
    if plain_values.has_method(kind, LENT["N"]):
        return "N"
    return getattr(kind, "borrowed", None)


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


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
