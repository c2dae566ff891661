"""Names that test files use of the module under test, read from their syntax trees."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from types import MappingProxyType

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
