"""The tests' side: a stand-in module for the solution, whose functions are called in the other jail.

The tests are trusted; values from the solution are plain data. If the task has an original of the target,
everything that is not under test (helpers, classes, constants) is taken from it and runs here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from nano_coder.grading.inside.report import LONGEST_NAME, ROOT, SKIPS, module_name, name_of, write_files

from .connection import ConnectionBroken, MalformedMessage, Peer, Unsendable
from .framework_runners import RUNNERS
from .solution_side import connect
from .stand_ins import exception_class, library
from .value_codec import DEEPEST, MALFORMED, Crossing, NotPlain

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST_MADE = 1000


class Broken(BaseException):
    """The solution can answer no more."""


class Tester(Peer):
    """Calls the solution, and records findings that no test may hide."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self.broken: str | None = None
        """gone | late | forged: why there are no more answers; None while there are"""
        self.findings: dict[str, str] = {}
        """kind -> detail; kinds: not_plain, needs_strict, skip, exit"""
        self.busy = ""
        """name of the function that is being called"""
        self.by_value = False
        """hide changes of arguments from the tests"""
        self.changed = False
        """whether a call changed an argument"""
        self.swallowed = False
        """whether an assertion failed in a function of ours that the solution called, and the solution hid
        that"""
        self.expect_stop = False
        """whether the tests mention StopIteration, which otherwise would end a loop around the call"""
        self._nests = False
        """whether a call returned or changed a container"""
        self._made: deque[Any] = deque(maxlen=_MOST_MADE)
        """exceptions, their classes, and modules that the tests got from the solution"""

    def call(self, message: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.busy = message.get("name", self.busy)
        try:
            value = self.guard(lambda: Peer.call(self, message, args, kwargs))
            self._nests = self._nests or isinstance(value, _CONTAINERS)
            return value
        except Unsendable as refused:
            if self._came_back((args, kwargs)):
                self.find("not_plain", f"{self.busy} was given back {refused}, which the solution had made")
            else:
                self.find(
                    "needs_strict", f"{self.busy} was given {refused}, which only a strict suite can pass"
                )
            raise
        except NotPlain as refused:
            self.find("not_plain", f"{self.busy} returned {refused}, no plain data")
            raise
        except SystemExit:
            self.find("exit", f"{self.busy} raised SystemExit")
            raise
        except (StopIteration, StopAsyncIteration) as error:
            if self.expect_stop:
                raise
            raise RuntimeError(f"{self.busy} raised {type(error).__name__}") from error
        except BaseException as error:
            self._made += [error, type(error)]
            self.swallowed = self.swallowed and not isinstance(error, AssertionError)
            if type(error).__name__ in SKIPS:
                self.find("skip", f"{self.busy} raised {type(error).__name__}")
            raise

    def _came_back(self, given: Any) -> bool:
        """Whether an unsendable argument came from the solution: an exception or module of its own, or a
        nesting that the tests did not build alone."""
        level, seen, made = [given], set[int](), set(map(id, self._made))
        for _ in range(DEEPEST):
            if any(id(value) in made or id(type(value)) in made for value in level):
                return True
            seen |= set(map(id, level))
            level = [item for value in level for item in _items_of(value) if id(item) not in seen]
            if not level:
                return False
        return self._nests

    def take_changes(self, crossing: Crossing, changes: Any) -> None:
        if changes:
            self.changed = self._nests = True
            if self.by_value:
                crossing.detach()
        super().take_changes(crossing, changes)

    def pack_error(self, error: BaseException) -> dict[str, Any]:
        self.swallowed = self.swallowed or isinstance(error, AssertionError)
        return super().pack_error(error)

    def deceived(self, kind: str) -> None:
        self.find("deceit", f"{self.busy} returned {kind}, whose comparisons say what is not")

    def guard(self, ask: Callable[[], Any]) -> Any:
        """Run a request. Raises Broken if it fails, and from then on always."""
        if self.broken:
            raise Broken(self.broken)
        try:
            return ask()
        except ConnectionBroken as error:
            self.broken = error.code
            if isinstance(error, MalformedMessage):
                self.find("forged", f"wrote {error} to the channel")
            raise Broken(self.broken) from error

    def _forged(self, what: Any) -> Broken:
        self.broken = "forged"
        self.find("forged", f"wrote {str(what)[:80]!r} to the channel")
        return Broken(self.broken)

    def find(self, kind: str, detail: str) -> None:
        # the text comes partly from the solution: it must not make the report unreadable
        self.findings.setdefault(kind, detail[:LONGEST_NAME].encode("ascii", "backslashreplace").decode())

    # ---------------------------------------------------------------------------------- the module

    def stand_in(self, job: dict[str, Any]) -> types.ModuleType:
        """A module in the solution's place. Raises what importing the solution raised."""
        name = module_name(ROOT, job["target"])
        module = self._original(job) if job["original"] is not None else types.ModuleType(name)
        given = {*vars(module), *_public(job["starred"])}
        names = [n for n in job["names"] if n in job["tested"] or n not in given]
        has = self._describe(names)
        for each in names:
            vars(module).pop(each, None)
            if each in has:
                vars(module)[each] = self._stand_in_for(each, has[each], name)
        vars(module)["__all__"] = [n for n in (*vars(module),) if not n.startswith("__")]
        vars(module)["__getattr__"] = lambda wanted: self._later(wanted, name)
        if "." in name:
            parent, _, last = name.rpartition(".")
            setattr(importlib.import_module(parent), last, module)
        sys.modules[name] = module
        return module

    def _original(self, job: dict[str, Any]) -> types.ModuleType:
        """The original of the target, executed as far as it runs: the rest may be what the task asks for."""
        name = module_name(ROOT, job["target"])
        module = types.ModuleType(name)
        module.__file__ = os.path.join(ROOT, job["target"])
        before = sys.modules.get(name)
        sys.modules[name] = module
        try:
            exec(compile(job["original"], module.__file__, "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit):
            pass
        finally:
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before
        return module

    def _describe(self, names: list[str]) -> dict[str, Any]:
        answer = self.guard(lambda: self.request({"ask": "describe", "names": names}))
        try:
            if "e" not in answer:
                return dict(answer["has"])
            error = self.error(answer)
        except MALFORMED as problem:
            raise self._forged(answer) from problem
        raise error

    def _later(self, wanted: str, module: str) -> Any:
        """An attribute that a test asks for and that was not foreseen."""
        has = {} if wanted.startswith("__") else self._describe([wanted])
        if wanted not in has:
            raise AttributeError(f"module {module!r} has no attribute {wanted!r}")
        return self._stand_in_for(wanted, has[wanted], module)

    def _stand_in_for(self, name: str, described: Any, module: str) -> Any:
        try:
            if "value" in described:
                return self.crossing().unpack(described["value"])
            if "error" in described:
                self._made.append(made := exception_class(described["error"]))
                return made
            if "module" in described:
                self._made.append(module_ := self._library(name, str(described["module"])))
                return module_
            if "function" in described:
                return self._function(name, str(described["function"]), module)
        except MALFORMED as problem:
            raise self._forged(described) from problem
        self.find("not_plain", f"{name} is {described.get('refused')!r}, which only a strict suite can use")
        return None

    def _library(self, name: str, described: str) -> types.ModuleType:
        """A module that the solution imported; from our standard library only."""
        return library(name if name in sys.stdlib_module_names else described)

    def _function(self, name: str, doc: str, module: str) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self.call({"ask": "call", "name": name}, args, kwargs)

        stand_in.__name__ = stand_in.__qualname__ = name
        stand_in.__doc__, stand_in.__module__ = doc, module
        return stand_in


def _items_of(value: Any) -> list[Any]:
    """The items of a container."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    return list(value) if isinstance(value, _CONTAINERS) else []


def _public(modules: list[str]) -> Iterator[str]:
    """The names that star imports of these modules provide."""
    for name in modules:
        with contextlib.suppress(ImportError):
            names = vars(importlib.import_module(name))
            yield from names.get("__all__", (each for each in names if not each.startswith("_")))


def main(nonce: str) -> None:
    channel = os.dup(1)
    tester = Tester(connect(quiet=1))
    job = tester.receive()
    tester.patience = float(job["patience"])
    tester.by_value = bool(job["by_value"])
    tester.expect_stop = any("StopIteration" in text for text in job["tests"].values())
    os.chdir(ROOT)
    write_files(ROOT, job["files"])

    def say(report: dict[str, Any]) -> None:
        os.write(channel, (nonce + json.dumps(report) + "\n").encode())

    def check(name: str, state: str) -> None:
        if state != "pass" and tester.broken:
            state = "timeout" if tester.broken == "late" else "error"
        if state == "pass" and tester.swallowed:
            state = "fail"
        tester.swallowed = False
        counted.append(name)
        say({"check": name, "state": state})

    counted: list[str] = []
    say({"ready": True})
    try:
        module = tester.stand_in(job)
        RUNNERS[job["framework"]](job["tests"], module, lambda names: say({"collected": names}), check)
    except BaseException as error:  # whatever the solution raises when it is imported, or tests that need it
        kind = name_of(type(error))
        if kind == "SystemExit" or kind in SKIPS:
            tester.find("exit" if kind == "SystemExit" else "skip", f"raised {kind} when it was imported")
        say({"import": kind})
    described = {"broken": tester.broken, "findings": tester.findings, "changed": tester.changed}
    say({"done": len(counted), **described})
