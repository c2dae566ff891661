"""Assertion tables: test scripts that only call the entry point on literals and compare its results.

Most published test scripts have this form. They are read as data here and compared in this process, so that
one jail is enough instead of two. A script qualifies only if each of its statements has one of the forms
below; any other is run as a test suite.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nano_coder.grading.cases import GradingOutcome, ask_child, judged
from nano_coder.grading.inside.value_codec import MALFORMED, Crossing, NotPlain
from nano_coder.grading.two_jail_suite import CPU_SECONDS, PATIENCE, WALL_SECONDS, Job
from nano_coder.grading.used_names import module_names
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.hidden_checks import Suite
from nano_shared.process import parse
from nano_shared.types import Limits

ValueComparison = Callable[[Any, Any], bool]
"""compares the returned value, packed, with the expected one"""

_CLOSE = """\
def same(a, b, tol):
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) is type(b) and a == b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or (tol > 0 and math.isclose(a, b, rel_tol=tol, abs_tol=tol)) or (a != a and b != b)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y, tol) for x, y in zip(a, b))
    return type(a) is type(b) and a == b
"""
"""the comparison function of scripts that loop over cases; a script with another text in its place does not
qualify"""
_LOOP = """\
for args, want in CASES:
    got = f(*copy.deepcopy(args))
    assert {test}, (args, got, want)
"""
_LOOP_TESTS = {
    "same(got, want, TOL)": "close",
    "set(map(repr, got)) == set(map(repr, want))": "as sets",
    "bool(got) == bool(want)": "as truth",
}
_ITERATED = (list, tuple, set, frozenset, dict, str)


class NoTable(Exception):
    """The script has a statement that no table has."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One call, and what it must return."""

    call: Mapping[str, Any]
    """args and kwargs, packed for the jail"""
    expected: Any
    equal: ValueComparison


@dataclass(frozen=True, slots=True)
class Table:
    entry: str
    rows: Mapping[str, TableRow]
    """by file and line"""


def read_table(suite: Suite, target: str) -> Table | None:
    """The suite as a table; None if it does not qualify."""
    if suite.framework != "script" or suite.strict or len(suite.files) != 1 or len(suite.names) > 1:
        return None
    ((file, text),) = suite.files.items()
    table = _read(file, text, target)
    return table if table is not None and suite.names in ((), (table.entry,)) else None


@functools.lru_cache(maxsize=512)
def _read(file: str, text: str, target: str) -> Table | None:
    try:
        return _Script(file, parse(text), module_names(target)).table()
    except (NoTable, NotPlain, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Script:
    """Reads a test script into a table. Raises NoTable, and what reading a literal raises."""

    def __init__(self, file: str, tree: ast.Module, modules: set[str]) -> None:
        self._file = file
        self._body = tree.body
        self._modules = modules
        self._alias: dict[str, str] = {}
        """name in the script -> name in the solution"""
        self._star = False
        self._rows: dict[str, TableRow] = {}
        self._entries: set[str] = set()

    def table(self) -> Table:
        body = [node for node in self._body if not self._imports(node)]
        if any(isinstance(node, ast.For) for node in body):
            self._loop(body)
        else:
            self._asserts(body)
        if len(self._entries) != 1 or not self._rows:
            raise NoTable
        return Table(self._entries.pop(), self._rows)

    def _imports(self, node: ast.stmt) -> bool:
        """Read an import statement; False for another statement."""
        if isinstance(node, ast.Import):
            # imported for the known forms only
            return all(alias.name in ("copy", "math") and alias.asname is None for alias in node.names)
        if not isinstance(node, ast.ImportFrom) or node.level or node.module not in self._modules:
            return False
        for alias in node.names:
            if alias.name == "*":
                self._star = True
            else:
                self._alias[alias.asname or alias.name] = alias.name
        return True

    def _row(self, line: int, called: str, args: list[Any], kwargs: dict[str, Any], row: Any) -> None:
        expected, equal = row
        if called not in self._alias and not self._star:
            raise NoTable
        self._entries.add(self._alias.get(called, called))
        name = f"{self._file}:{line}"
        if name in self._rows:
            name = f"{name}.{len(self._rows) + 1}"
        args_packed, kwargs_packed = Crossing().pack([args, kwargs])
        self._rows[name] = TableRow({"args": args_packed, "kwargs": kwargs_packed}, expected, equal)

    # ----------------------------------------------------------------------- a loop over cases

    def _loop(self, body: list[ast.stmt]) -> None:
        if self._star or set(self._alias) != {"f"}:
            raise NoTable  # another name could replace one that the loop uses
        helper, tolerance, cases, loop = body
        if ast.unparse(helper) != _plainly(_CLOSE):
            raise NoTable
        tol = _constant(tolerance, "TOL")
        if type(tol) not in (int, float):
            raise NoTable
        kinds = {_plainly(_LOOP.format(test=test)): kind for test, kind in _LOOP_TESTS.items()}
        equal = _comparison(kinds.get(ast.unparse(loop), ""), tol)
        value = _assigned(cases, "CASES")
        if not isinstance(value, ast.List):
            raise NoTable
        for item in value.elts:
            args, expected = ast.literal_eval(item)
            if type(args) is not list:
                raise NoTable
            self._row(item.lineno, "f", args, {}, (expected, equal))

    # ------------------------------------------------------------------------- asserts on calls

    def _asserts(self, body: list[ast.stmt]) -> None:
        """Read asserts at the top level, or in one function `check` that is called with the entry point."""
        called = None
        body = [node for node in body if not _is_metadata(node)]
        if len(body) == 2 and isinstance(body[0], ast.FunctionDef):
            called = self._checked(body[0], body[1])
            parameter = body[0].args.args[0].arg
            body = [node for node in body[0].body if not _is_text(node)]
        for node in body:
            if not isinstance(node, ast.Assert) or not isinstance(node.msg, ast.Constant | None):
                raise NoTable
            name, args, kwargs, row = _asserted(node.test)
            if called is not None:
                if name != parameter:
                    raise NoTable
                name = called
            self._row(node.lineno, name, args, kwargs, row)

    def _checked(self, check: ast.FunctionDef, call: ast.stmt) -> str:
        """The name that `check` is called with."""
        given = check.args
        others = (given.posonlyargs, given.kwonlyargs, given.defaults, given.vararg, given.kwarg)
        if len(given.args) != 1 or any(others) or check.decorator_list or check.name in self._alias:
            raise NoTable
        match call:
            case ast.Expr(ast.Call(ast.Name(name), [ast.Name(entry)], [])) if name == check.name:
                return entry
        raise NoTable


def _asserted(test: ast.expr) -> tuple[str, list[Any], dict[str, Any], tuple[Any, ValueComparison]]:
    """The call of an assertion, and what it must return."""
    row: tuple[Any, ValueComparison]
    match test:
        case ast.Compare(ast.Call() as call, [ast.Eq()], [expected]):
            row = (ast.literal_eval(expected), _equal)
        case ast.Call() as call:
            row = (True, _comparison("as truth", 0))
        case ast.UnaryOp(ast.Not(), ast.Call() as call):
            row = (False, _comparison("as truth", 0))
        case _:
            raise NoTable
    if not isinstance(call.func, ast.Name):
        raise NoTable
    args = [ast.literal_eval(arg) for arg in call.args]
    kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
    if len(kwargs) != len(call.keywords):
        raise NoTable
    return call.func.id, args, kwargs, row


def _is_metadata(node: ast.stmt) -> bool:
    """Whether the statement assigns a literal to METADATA, which nothing reads."""
    try:
        ast.literal_eval(_assigned(node, "METADATA"))
    except (NoTable, ValueError):
        return False
    return True


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _assigned(node: ast.stmt, name: str) -> ast.expr:
    match node:
        case ast.Assign([ast.Name(bound)], value) if bound == name:
            return value
    raise NoTable


def _constant(node: ast.stmt, name: str) -> Any:
    return ast.literal_eval(_assigned(node, name))


@functools.cache
def _plainly(text: str) -> str:
    """Source as `ast.unparse` writes it, so that layout and comments do not matter."""
    return ast.unparse(parse(text))


# --------------------------------------------------------------------------------- comparisons


class Elsewhere(Exception):
    """The value must be compared in a jail."""


class _Tree(Crossing):
    """A value that contains no container twice, so that writing it out does not make it longer."""

    def unpack(self, node: Any, depth: int = 0) -> Any:
        if type(node) is dict and "r" in node:
            raise Elsewhere
        return super().unpack(node, depth)


def _comparison(kind: str, tol: float) -> ValueComparison:
    """The comparison for one of the forms of a loop's assertion; it takes the packed value."""
    if kind == "close":
        names: dict[str, Any] = {"math": math}
        exec(compile(_CLOSE, "same", "exec", dont_inherit=True), names)
        return lambda node, want: bool(names["same"](Crossing().unpack(node), want, tol))
    if kind == "as sets":
        return _equal_as_sets
    if kind == "as truth":
        return lambda node, want: bool(Crossing().unpack(node)) == bool(want)
    raise NoTable


def _equal(node: Any, want: Any) -> bool:
    return bool(Crossing().unpack(node) == want)


def _equal_as_sets(node: Any, want: Any) -> bool:
    got = _Tree().unpack(node)
    if type(got) not in _ITERATED or type(want) not in _ITERATED:
        raise Elsewhere  # a range, for one, may be practically endless
    return set(map(repr, got)) == set(map(repr, want))


# --------------------------------------------------------------------------------------- grading


def run_table(job: Job, table: Table, limits: Limits, sandbox: Sandbox) -> GradingOutcome | None:
    """Make the calls in one jail and compare here; None if a value came that only the tests themselves can
    judge.

    The calls share one process, as in the script: later ones see the side effects of earlier ones. Raises
    SandboxError if the jail fails.
    """
    child_job = {
        "files": job.solution_files(), "target": job.target, "entry": table.entry, "fork": "run",
        "typed": True, "cases": [row.call for row in table.rows.values()], "cpu_seconds": CPU_SECONDS,
        "wall_seconds": PATIENCE, "patience": 1,
    }  # fmt: skip
    reports, result = ask_child(child_job, limits, sandbox, wall=WALL_SECONDS)
    if any(report.keys() & {"not_plain", "too_long"} for report in reports):
        return None
    try:
        return judged(list(table.rows), _right(table), reports, result)
    except Elsewhere:
        return None


def _right(table: Table) -> Callable[[str, Any], bool]:
    def right(name: str, node: Any) -> bool:
        row = table.rows[name]
        try:
            return row.equal(node, row.expected)
        except MALFORMED:
            raise Elsewhere from None  # a run in the tests' jail decides whether it is forged

    return right
