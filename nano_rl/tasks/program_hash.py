"""Hash of a program that does not depend on its names, annotations and docstrings."""

from __future__ import annotations

import ast

from nano_shared.files import content_hash
from nano_shared.process import parse


class Anonymous(ast.NodeTransformer):
    """Renames every name that the function binds, in order of appearance, and drops annotations."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _rename(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self._rename(node.name)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        for arg in node.args.args:
            arg.arg, arg.annotation = self._rename(arg.arg), None
        bound = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for name in bound:
            self._rename(name)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node


def program_hash(source: str) -> str:
    """Content hash of the source's AST with names, annotations and docstrings normalised away."""
    return content_hash(ast.dump(Anonymous().visit(parse(source))))
