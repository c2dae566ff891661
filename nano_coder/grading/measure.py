"""Runs inside the jail: counts what a syntax tree holds. Standard library only."""

from __future__ import annotations

import ast
import json
import sys

BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.match_case,
    ast.Assert,
)
BLOCKS = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match,
)  # fmt: skip
HIDING = ("exec", "eval", "compile", "__import__", "import_module")


def is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))


def nesting(tree: ast.AST) -> int:
    """Blocks around the innermost statement; `elif` is no deeper than its `if`, a definition begins anew."""
    deepest, pending = 0, [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        deepest = max(deepest, depth)
        for child in ast.iter_child_nodes(node):
            chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
            begins = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            within = depth if chained else depth + isinstance(child, BLOCKS)
            pending.append((child, 0 if begins else within))
    return deepest


def lines(tree: ast.AST) -> int:
    held: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.alias)) and not is_docstring(node):
            held |= {node.lineno, node.end_lineno or node.lineno}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_docstring(node)]
    inside = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(held - inside)


def hides(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in HIDING
    return isinstance(node, ast.Attribute) and node.attr in ("import_module", "exec_module", "__import__")


def measured(texts: dict[str, str]) -> dict[str, int] | None:
    total = {"statements": 0, "branches": 0, "nesting": 0, "lines": 0, "hidden": 0}
    for text in texts.values():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        nodes = list(ast.walk(tree))
        total["statements"] += sum(isinstance(n, ast.stmt) and not is_docstring(n) for n in nodes)
        total["branches"] += sum(map(branches, nodes))
        total["nesting"] = max(total["nesting"], nesting(tree))
        total["lines"] += lines(tree)
        total["hidden"] += sum(map(hides, nodes))
    return total


if __name__ == "__main__":
    print(json.dumps(measured(json.load(sys.stdin))))
