"""What test files use of the module under test, read from their syntax trees."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping

_BUILTIN = frozenset(dir(builtins))


def used_names(tests: Mapping[str, str], target: str) -> set[str]:
    """Names that the tests import from the target, use as its attributes, or need from a star import.

    A star import gives neither builtins nor what a test file defines itself: the solution must not stand in
    for `all` or `isinstance`. Files that are no Python (doctests) use what their examples do.
    """
    return {name for text in tests.values() for name in _of_file(text, target)}


def _of_file(text: str, target: str) -> set[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
    modules = module_names(target)
    found: set[str] = set()
    aliases: set[str] = set()
    star = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            star = star or any(alias.name == "*" for alias in node.names)
            found |= {alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name in modules}
    found |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
    }
    return found | (_free(tree) if star else set())


def module_names(target: str) -> set[str]:
    """Every dotted name under which the target may be imported."""
    parts = target.removesuffix(".py").split("/")
    return {".".join(parts[first:]) for first in range(len(parts))}


def _free(tree: ast.AST) -> set[str]:
    """Names that are read and never bound in the file."""
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
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound - _BUILTIN
