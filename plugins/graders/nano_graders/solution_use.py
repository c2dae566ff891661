"""How tests use a solution: which of its names, and whether in ways that plain values cannot carry.

Tests that call functions on plain values and compare plain results run apart from the solution. Whatever else
is not known to be carried (fixtures that watch or change the process, classes, methods and attributes of what
the solution returns) counts as live use: it needs the solution in the tests' own process. What the solution
is plays no part, so no solution can choose how it is graded.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import unittest
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

from nano_shared.hidden_checks import Suite
from nano_shared.process import parse

_BUILTIN = frozenset(dir(builtins))


def used_names(
    tests: Mapping[str, str],
    target: str,
    files: Mapping[str, str] = MappingProxyType({}),
    *,
    star: bool = True,
) -> set[str]:
    """Names that the tests import from the target, use as its attributes, or need from a star import.

    A star import provides no builtins, no names that the test file defines itself, and none that it gets by a
    star from another of `files`: the solution must not replace `all` or a comparison. `star` False: ignore
    star imports. Files that are not Python (doctests) use the names in their examples.
    """
    return {name for text in tests.values() for name in _of_file(text, target, files, star)}


def starred(tests: Mapping[str, str], target: str, files: Mapping[str, str]) -> set[str]:
    """Modules, besides the target and `files`, that tests import by star."""
    own = module_names(target) | {each for file in files for each in module_names(file)}
    trees = [_parsed(text) for text in (*tests.values(), *files.values())]
    return {module for tree in trees for module in _stars(tree)} - own


def _stars(tree: ast.AST) -> set[str]:
    return {
        str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    }


def _parsed(text: str) -> ast.Module:
    try:
        return parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _of_file(text: str, target: str, files: Mapping[str, str], star: bool) -> set[str]:
    tree = _parsed(text)
    modules = module_names(target)
    found: set[str] = set()
    aliases: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            found |= {alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name in modules}
    found |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
    }
    stars = _stars(tree)
    if not star or not stars & modules:
        return found
    others = [text for file, text in files.items() if file != target and module_names(file) & stars]
    return found | (_free(tree) - {name for text in others for name in _names(_parsed(text))[1]})


def module_names(target: str) -> set[str]:
    """Every dotted name under which the target may be imported."""
    parts = target.removesuffix(".py").split("/")
    return {".".join(parts[first:]) for first in range(len(parts))}


def _free(tree: ast.AST) -> set[str]:
    """Names that are read and never bound in the file."""
    read, bound = _names(tree)
    return {name for name in read - bound - _BUILTIN if not name.startswith("__")}


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names that are read in the file, and names that are bound."""
    read: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
    return read, bound


_CARRIED_MODULES = frozenset({
    "__future__", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "numpy", "operator",
    "pytest",    "re", "statistics", "string", "textwrap", "typing", "unittest", "uuid",
})  # fmt: skip
_PYTEST = frozenset({"approx", "fail", "fixture", "main", "mark", "param", "raises"})
_WATCHING = frozenset({
    "assertWarns", "assertWarnsRegex", "assertLogs", "assertNoLogs", "getcontext", "setcontext",
    "localcontext", "get_type_hints", "mock", "random", "singledispatch", "IsolatedAsyncioTestCase",
})  # fmt: skip
"""attributes of carried modules and of test cases that look at the process, or change it"""
_LIVE_BUILTINS = frozenset({
    "__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals", "hasattr",
    "help", "id", "input", "issubclass", "locals", "open", "setattr", "vars", "__file__",
})  # fmt: skip
_PLAIN = (
    str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range, deque, Counter,
    OrderedDict, datetime, timedelta, Decimal, Fraction, BaseExceptionGroup, OSError, StopIteration,
    SystemExit, UnicodeDecodeError, unittest.TestCase,
)  # fmt: skip
_PLAIN_ATTRIBUTES = frozenset(
    {name for kind in _PLAIN for name in dir(kind) if not name.startswith("__")}
    | {
        "exception",
        "value",
        "match",
        "__cause__",
        "__context__",
        "__notes__",
        "shape",
        "dtype",
        "tolist",
        "ndim",
        "sum",
        "all",
        "any",
    }
)
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex", "issubclass"})


def live_use(suite: Suite, target: str) -> str | None:
    """What in the tests needs the solution in their own process; None if nothing does."""
    texts = {
        name: text if suite.framework != "doctest" else _examples(text) for name, text in suite.files.items()
    }
    names = {*used_names(texts, target), *suite.names}
    for name, text in texts.items():
        try:
            tree = parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue  # it fails, wherever it runs
        own = names if suite.framework != "doctest" else names | _capitals(tree)
        reason = next(_Tests(own, target, suite.files).live(tree), None)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _examples(text: str) -> str:
    try:
        return "".join(example.source for example in doctest.DocTestParser().get_examples(text))
    except ValueError:
        return ""


def _capitals(tree: ast.AST) -> set[str]:
    """Names that are spelt like classes, and are no builtins."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in read if name[:1].isupper() and not hasattr(builtins, name)}


class _Tests:
    """One test file. `names` are those of the solution."""

    def __init__(self, names: set[str], target: str, files: Mapping[str, str]) -> None:
        self._names = names
        self._target = module_names(target)
        self._tests = {name for file in files for name in module_names(file)}
        self._modules: set[str] = set()
        """local names of the solution's module"""
        self._carried: set[str] = set()
        """local names of carried modules"""
        self._from: set[str] = set()
        """local names of what is imported from modules other than the solution"""
        self._results: set[str] = set()
        """local names of what calls of the solution gave"""

    def live(self, tree: ast.Module) -> Iterator[str]:
        """The reasons, as ends of a sentence about the file."""
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._imported(node)
        assigned = [n for n in nodes if isinstance(n, ast.Assign) and self._is_result(n.value)]
        self._results |= {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name)}
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        raised = {id(part) for node in nodes for part in _raised(node)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from self._defined(node)
            elif isinstance(node, ast.Attribute):
                yield from self._read(node)
            elif isinstance(node, ast.AsyncWith | ast.Await | ast.AsyncFor):
                yield "is asynchronous"
            elif isinstance(node, ast.withitem) and not self._own_context(node.context_expr):
                yield "enters a context"
            elif isinstance(node, ast.Compare) and self._identity(node):
                yield "compares identities"
            elif isinstance(node, ast.Name) and node.id in _LIVE_BUILTINS:
                yield f"uses {node.id}"
            if id(node) not in raised and _is_class(self._of_solution(node) or "", id(node) in called):
                yield f"uses the class {self._of_solution(node)}"
        yield from self._fixtures(tree, nodes)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        for name in names:
            if name not in self._target | self._tests and name.partition(".")[0] not in _CARRIED_MODULES:
                yield f"imports {name}"
            if name.partition(".")[2] and name.partition(".")[2].split(".")[0] in _WATCHING:
                yield f"imports {name}"
        for alias in node.names:
            local = (alias.asname or alias.name).partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                if node.module not in self._target:
                    self._from.add(local)
                    if alias.name in _WATCHING:
                        yield f"imports {alias.name}"
            elif alias.name in self._target:
                self._modules.add(local)
            else:
                self._carried.add(local)

    def _of_solution(self, node: ast.AST) -> str | None:
        """The name of the solution that an expression is."""
        match node:
            case ast.Name(name) if name in self._names:
                return name
            case ast.Attribute(ast.Name(module), name) if module in self._modules:
                return name
        return None

    def _defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
        if isinstance(node, ast.AsyncFunctionDef):
            yield "is asynchronous"
        used = [*node.decorator_list, *(node.bases if isinstance(node, ast.ClassDef) else ())]
        for part in used:
            called = part.func if isinstance(part, ast.Call) else part
            if name := self._of_solution(called):
                yield f"decorates or derives from {name}"

    def _read(self, node: ast.Attribute) -> Iterator[str]:
        base = node.value
        if (name := self._of_solution(base)) is not None:
            yield f"reads {name}.{node.attr}"
        elif isinstance(base, ast.Name) and base.id in self._modules:
            if not isinstance(node.ctx, ast.Load) or node.attr.startswith("__"):
                yield f"changes or inspects {base.id}.{node.attr}"
        elif node.attr in _WATCHING or (
            isinstance(base, ast.Name) and base.id == "pytest" and node.attr not in _PYTEST
        ):
            yield f"uses {node.attr}"
        elif not _rooted(base, self._carried | {"self", "cls"}) and node.attr not in _PLAIN_ATTRIBUTES:
            yield f"reads an attribute {node.attr}"

    def _own_context(self, node: ast.expr) -> bool:
        """Whether a context is one of the test runner or of a carried module."""
        return isinstance(node, ast.Call) and _rooted(node.func, self._carried | self._from | {"self", "cls"})

    def _is_result(self, node: ast.expr) -> bool:
        """Whether it is a value of the solution, what a call of it gives, or a name for one of these."""
        kept = isinstance(node, ast.Name) and node.id in self._results
        return kept or bool(self._of_solution(node.func if isinstance(node, ast.Call) else node))

    def _identity(self, node: ast.Compare) -> bool:
        """Whether the identity of two values of the solution is compared."""
        results = [part for part in (node.left, *node.comparators) if self._is_result(part)]
        return len(results) > 1 and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)

    def _fixtures(self, tree: ast.Module, nodes: Iterable[ast.AST]) -> Iterator[str]:
        """Fixtures that tests ask for and that no test file defines."""
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
        fixtures = [f for f in functions if any("fixture" in ast.unparse(d) for d in f.decorator_list)]
        known = {f.name for f in fixtures} | {"self", "cls"}
        for function in functions:
            if function in fixtures or function.name.startswith("test"):
                given = {argument.arg for argument in function.args.args}
                decorated = " ".join(ast.unparse(d) for d in function.decorator_list)
                decorated += " ".join(
                    ast.unparse(d) for n in nodes if isinstance(n, ast.ClassDef) for d in n.decorator_list
                )
                missing = sorted(g for g in given - known if f"{g}" not in decorated)
                if missing:
                    yield f"uses the fixture {missing[0]}"


def _raised(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions that name exceptions to be caught."""
    match node:
        case ast.ExceptHandler(kind) if kind is not None:
            yield from ast.walk(kind)
        case ast.Call(ast.Attribute(_, name) | ast.Name(name), [first, *_]) if name in _RAISES:
            yield from ast.walk(first)


def _is_class(name: str, called: bool) -> bool:
    """Whether a name of the solution is spelt like a class, or is a constant that is called."""
    return name[:1].isupper() and (called or name != name.upper())


def _rooted(node: ast.expr, names: set[str]) -> bool:
    """Whether the expression is one of these names, or an attribute of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names
