"""A clumsy version of a one-line function: the same results by more statements."""

from __future__ import annotations

import ast
from collections.abc import Callable

from nano_rl.tasks.program import Program

Lines = list[str]


def clumsy(program: Program) -> tuple[str, ...] | None:
    """Body lines that do what the program's only line does, at length; None where no way is known."""
    if len(program.body) != 1:
        return None
    statement = ast.parse(program.body[0]).body[0]
    if not isinstance(statement, ast.Return) or statement.value is None:
        return None
    value = statement.value
    text = program.source(doc=False)
    names = [n for n in ("out", "result", "flag", "first", "second", "item", "total") if n not in text]
    for way in (_listed, _summed, _chosen, _decided, _stepped):
        if (lines := way(value, names)) is not None:
            return tuple(lines)
    return None


def _loop(comprehension: ast.ListComp | ast.GeneratorExp, inner: Callable[[str], Lines]) -> Lines | None:
    """The loop of a comprehension with one `for`; its conditions are nested."""
    if len(comprehension.generators) != 1:
        return None
    generator = comprehension.generators[0]
    lines, pad = [f"for {ast.unparse(generator.target)} in {ast.unparse(generator.iter)}:"], "    "
    for condition in generator.ifs:
        lines.append(f"{pad}if {ast.unparse(condition)}:")
        pad += "    "
    return [*lines, *(pad + line for line in inner(ast.unparse(comprehension.elt)))]


def _listed(value: ast.expr, names: list[str]) -> Lines | None:
    if not isinstance(value, ast.ListComp) or "out" not in names:
        return None
    loop = _loop(value, lambda element: [f"out.append({element})"])
    return ["out = []", *loop, "return out"] if loop else None


def _summed(value: ast.expr, names: list[str]) -> Lines | None:
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and "total" in names):
        return None
    if value.func.id != "sum" or not isinstance(value.args[0], ast.GeneratorExp | ast.ListComp):
        return None
    loop = _loop(value.args[0], lambda element: [f"total = total + ({element})"])
    return ["total = 0", *loop, "return total"] if loop else None


def _chosen(value: ast.expr, names: list[str]) -> Lines | None:
    if not isinstance(value, ast.IfExp) or "result" not in names:
        return None
    return [
        f"if {ast.unparse(value.test)}:",
        f"    result = {ast.unparse(value.body)}",
        "else:",
        f"    result = {ast.unparse(value.orelse)}",
        "return result",
    ]


def _decided(value: ast.expr, names: list[str]) -> Lines | None:
    """A test as branches that say True or False."""
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
        head, *rest = value.values
        tail = " and ".join(ast.unparse(v) for v in rest)
        return [f"if {ast.unparse(head)}:", f"    if {tail}:", "        return True", "return False"]
    if isinstance(value, ast.Compare) or (isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or)):
        return [f"if {ast.unparse(value)}:", "    return True", "else:", "    return False"]
    return None


def _stepped(value: ast.expr, names: list[str]) -> Lines | None:
    """The two sides of an operation, one after the other."""
    if not isinstance(value, ast.BinOp) or not {"first", "second", "result"} <= set(names):
        return None
    both = ast.unparse(ast.BinOp(ast.Name("first"), value.op, ast.Name("second")))
    return [
        f"first = {ast.unparse(value.left)}",
        f"second = {ast.unparse(value.right)}",
        f"result = {both}",
        "return result",
    ]
