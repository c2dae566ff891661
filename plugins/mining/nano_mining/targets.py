"""Functions and classes of a module, and the changes of its text that make tasks of them.

Every change replaces whole lines and is undone by one edit of one line, which is the task's oracle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nano_rl.tasks.suite import program_hash
from nano_shared.process import parse

LONGEST = 120
"""lines of a function or class that is asked for"""
_DOCSTRING = (30, 4000)
"""characters of a docstring that says what is asked for, and that a prompt quotes"""
MISSING = "raise NotImplementedError"

_Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function, method or class of a module; lines are 1-based."""

    path: str
    name: str
    """with its class, as `Counter.update`"""
    is_class: bool
    first: int
    """line of the first decorator, or of the definition"""
    body: int | None
    """first line after the docstring; None where the body begins on another line's end"""
    end: int
    documented: bool
    """by its docstring, and those of the public methods of a class"""
    functions: frozenset[int]
    """first lines of the functions that it is or has"""
    hash: str
    """of the program, without names"""

    @property
    def size(self) -> int:
        """Lines of the body, or of a class as a whole."""
        return self.end - (self.first if self.is_class or self.body is None else self.body) + 1

    def holds(self, line: int) -> bool:
        return self.first <= line <= self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """A changed module and the edit of one line that repairs it."""

    source: str
    line: int
    new: str


def targets_of(path: str, text: str) -> list[Target]:
    """The functions, methods and classes of a module; none for a text that is no Python."""
    try:
        tree = parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.split("\n")
    return [_target(path, name, node, lines) for name, node in _definitions(tree.body, "")]


def _definitions(body: list[ast.stmt], within: str) -> Iterator[tuple[str, _Def | ast.ClassDef]]:
    for node in body:
        if isinstance(node, _Def | ast.ClassDef):
            yield within + node.name, node
        if isinstance(node, ast.ClassDef) and not within:
            yield from _definitions(node.body, f"{node.name}.")


def _target(path: str, name: str, node: _Def | ast.ClassDef, lines: list[str]) -> Target:
    inside = [node] if isinstance(node, _Def) else [n for n in ast.walk(node) if isinstance(n, _Def)]
    first, end = first_line(node), node.end_lineno or node.lineno
    whole = "\n".join(lines[first - 1 : end])
    margin = len(whole) - len(whole.lstrip(" \t"))
    return Target(
        path=path, name=name, is_class=isinstance(node, ast.ClassDef), first=first, body=_body(node), end=end,
        documented=_is_documented(node),
        functions=frozenset(first_line(n) for n in inside),
        hash=program_hash(re.sub(rf"^[ \t]{{{margin}}}", "", whole, flags=re.MULTILINE)),
    )  # fmt: skip


def _is_documented(node: _Def | ast.ClassDef) -> bool:
    """Whether its docstring, and those of the public methods of a class, can say what is asked for."""
    least, most = _DOCSTRING
    said = least <= len(ast.get_docstring(node) or "") <= most
    parts = node.body if isinstance(node, ast.ClassDef) else ()
    methods = [part for part in parts if isinstance(part, _Def) and not part.name.startswith("_")]
    return said and all(ast.get_docstring(method) for method in methods)


def first_line(node: ast.stmt) -> int:
    """The line that a statement begins on, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _body(node: _Def | ast.ClassDef) -> int | None:
    """The first line of the body without its docstring, if whole lines hold it."""
    documented = ast.get_docstring(node, clean=False) is not None
    rest = node.body[1:] if documented else node.body
    if not rest:
        return None
    before = (node.body[0].end_lineno if documented else _head_end(node)) or 0
    return before + 1 if rest[0].lineno > before else None


def _head_end(node: _Def | ast.ClassDef) -> int:
    """The last line of the signature that the tree knows of, which holds its colon or stands before it."""
    parts = node.bases if isinstance(node, ast.ClassDef) else [*ast.walk(node.args)]
    ends = [getattr(part, "end_lineno", None) or 0 for part in parts]
    returns = getattr(node, "returns", None)
    return max([node.lineno, *ends, getattr(returns, "end_lineno", None) or 0, node.body[0].lineno - 1])


def without_body(text: str, target: Target) -> Breakage | None:
    """The function with its docstring, raising NotImplementedError."""
    if target.body is None or target.is_class:
        return None
    lines = text.split("\n")
    old = lines[target.body - 1 : target.end]
    code = next(line for line in reversed(old) if line.strip())
    first = next((line for line in old if line.strip() and not line.strip().startswith("#")), code)
    hole = first[: len(first) - len(first.lstrip())] + MISSING
    source = "\n".join([*lines[: target.body - 1], hole, *lines[target.end :]])
    return _parsing(Breakage(source=source, line=target.body, new="\n".join(old)))


def without_definition(text: str, target: Target) -> Breakage | None:
    """The module without the function or class; the edit puts it next to a line beside it."""
    lines = text.split("\n")
    before, old, rest = lines[: target.first - 1], lines[target.first - 1 : target.end], lines[target.end :]
    source = "\n".join([*before, *rest])
    if any(rest):
        return _parsing(Breakage(source=source, line=target.first, new="\n".join([*old, rest[0], ""])))
    if not before:
        return None
    return _parsing(Breakage(source=source, line=len(before), new="\n".join([before[-1], *old])))


def _parsing(breakage: Breakage) -> Breakage | None:
    try:
        parse(breakage.source)
    except SyntaxError:
        return None
    return breakage


def outline(text: str, target: Target) -> str:
    """The signature and docstring of a function; of a class, those of its methods too."""
    lines = text.split("\n")
    if not target.is_class:
        return "\n".join(lines[target.first - 1 : (target.body or target.end + 1) - 1])
    shown: list[str] = []
    at = target.first
    methods = [t for t in targets_of(target.path, text) if t.name.startswith(f"{target.name}.")]
    for method in methods:
        if method.body is not None and not method.is_class:
            first = lines[method.first - 1]
            margin = first[: len(first) - len(first.lstrip())]
            shown += [*lines[at - 1 : method.body - 1], f"{margin}    ..."]
            at = method.end + 1
    return "\n".join([*shown, *lines[at - 1 : target.end]])


def without_tests(text: str, drop: Callable[[str], bool]) -> str:
    """A test file without the tests whose names `drop` holds true, nor classes that then hold nothing."""
    lines = text.split("\n")
    for node in reversed(parse(text).body):
        if isinstance(node, _Def) and _is_test(node.name) and drop(node.name):
            del lines[first_line(node) - 1 : node.end_lineno]
        elif isinstance(node, ast.ClassDef):
            _drop_methods(node, lines, drop, text)
    return "\n".join(lines)


def _drop_methods(node: ast.ClassDef, lines: list[str], drop: Callable[[str], bool], text: str) -> None:
    dropped = [n for n in node.body if isinstance(n, _Def) and _is_test(n.name) and drop(n.name)]
    empty = len(dropped) == len(node.body) - (ast.get_docstring(node) is not None)
    if dropped and empty and len(re.findall(rf"\b{node.name}\b", text)) == 1:
        del lines[first_line(node) - 1 : node.end_lineno]
        return
    for method in reversed(dropped):
        lines[first_line(method) - 1 : method.end_lineno] = []
    if dropped and empty:
        margin = " " * node.body[-1].col_offset
        lines.insert(first_line(dropped[0]) - 1, f"{margin}pass")


def _is_test(name: str) -> bool:
    return name.startswith("test")
