"""Level 6: shorten a verbose function to a bound on its source without changing its results."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import replace

from nano_rl.tasks.suite import Made
from nano_shared.hidden_checks import Metric
from nano_shared.process import parse
from nano_shared.types import Split
from nano_suites.checks.source_measure import measured
from nano_suites.functions.admitted_program import (
    LONG,
    MODULES,
    WRITE_TOOLS,
    AdmittedProgram,
    belongs,
    call,
    cases_of,
    check_of,
    draw_admitted,
    edited,
    failing,
)
from nano_suites.functions.module import Module, assertions_of
from nano_suites.functions.program import Program
from nano_suites.functions.prompt_phrases import REFACTOR

SourceLines = list[str]


def verbose_body(program: Program) -> tuple[str, ...] | None:
    """A verbose body for a one-line program; None if there is no rule for it."""
    if len(program.body) != 1:
        return None
    statement = parse(program.body[0]).body[0]
    if not isinstance(statement, ast.Return) or statement.value is None:
        return None
    value = statement.value
    text = program.source(doc=False)
    names = [n for n in ("out", "result", "flag", "first", "second", "item", "total") if n not in text]
    for way in (_listed, _summed, _chosen, _decided, _stepped):
        if (lines := way(value, names)) is not None:
            return tuple(lines)
    return None


def _loop(
    comprehension: ast.ListComp | ast.GeneratorExp, inner: Callable[[str], SourceLines]
) -> SourceLines | None:
    """The loop of a comprehension with one `for`; its conditions are nested."""
    if len(comprehension.generators) != 1:
        return None
    generator = comprehension.generators[0]
    lines, pad = [f"for {ast.unparse(generator.target)} in {ast.unparse(generator.iter)}:"], "    "
    for condition in generator.ifs:
        lines.append(f"{pad}if {ast.unparse(condition)}:")
        pad += "    "
    return [*lines, *(pad + line for line in inner(ast.unparse(comprehension.elt)))]


def _listed(value: ast.expr, names: list[str]) -> SourceLines | None:
    if not isinstance(value, ast.ListComp) or "out" not in names:
        return None
    loop = _loop(value, lambda element: [f"out.append({element})"])
    return ["out = []", *loop, "return out"] if loop else None


def _summed(value: ast.expr, names: list[str]) -> SourceLines | None:
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and "total" in names):
        return None
    if value.func.id != "sum" or not isinstance(value.args[0], ast.GeneratorExp | ast.ListComp):
        return None
    loop = _loop(value.args[0], lambda element: [f"total = total + ({element})"])
    return ["total = 0", *loop, "return total"] if loop else None


def _chosen(value: ast.expr, names: list[str]) -> SourceLines | None:
    if not isinstance(value, ast.IfExp) or "result" not in names:
        return None
    test, one, other = map(ast.unparse, (value.test, value.body, value.orelse))
    return [f"if {test}:", f"    result = {one}", "else:", f"    result = {other}", "return result"]


def _decided(value: ast.expr, names: list[str]) -> SourceLines | None:
    """A test as branches that say True or False."""
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
        head, *rest = value.values
        tail = " and ".join(ast.unparse(v) for v in rest)
        return [f"if {ast.unparse(head)}:", f"    if {tail}:", "        return True", "return False"]
    if isinstance(value, ast.Compare) or (isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or)):
        return [f"if {ast.unparse(value)}:", "    return True", "else:", "    return False"]
    return None


def _stepped(value: ast.expr, names: list[str]) -> SourceLines | None:
    """The two sides of an operation, one after the other."""
    if not isinstance(value, ast.BinOp) or not {"first", "second", "result"} <= set(names):
        return None
    both = ast.BinOp(ast.Name("first"), value.op, ast.Name("second"))
    left, right, result = map(ast.unparse, (value.left, value.right, both))
    return [f"first = {left}", f"second = {right}", f"result = {result}", "return result"]


BOUNDS = {
    "statements": "{n} statements, the def included",
    "lines": "{n} lines of code, the docstring not counted",
}


def _draw(rng: random.Random, split: Split) -> tuple[AdmittedProgram, Program]:
    """A program and its verbose version, both of the split, with the same results."""
    while True:
        admitted = draw_admitted(rng, split, lambda p: bool(verbose_body(p)) and len(p.body_lines[0]) < 90)
        program = admitted.program
        worse = replace(program, body=verbose_body(program) or ())
        if not belongs(program.family, worse.source(doc=False), split):
            continue
        if not any(failing(admitted, worse.source(), (*admitted.examples, *admitted.hidden))):
            return admitted, worse


def make_refactor(rng: random.Random, split: Split, level: int) -> Made:
    """The bound is met by the concise version and exceeded by the verbose one."""
    admitted, worse = _draw(rng, split)
    program, module = admitted.program, Module(rng.choice(MODULES), (admitted,))
    name = rng.choice(sorted(BOUNDS))
    needed = (measured({module.path: program.source()}) or {})[name]
    test, bound = f"test_{module.name}.py", BOUNDS[name].format(n=needed)
    metric = Metric.model_validate({"name": name, "at_most": needed})
    return edited(
        program, module.path, call("write_file", path=module.path, content=program.source()),
        prompt=rng.choice(REFACTOR).format(name=program.name, path=module.path, test=test, bound=bound),
        files={module.path: worse.source(), test: assertions_of([module])}, tools=WRITE_TOOLS,
        check=check_of(module.name), hidden=cases_of(admitted).model_copy(update={"metrics": (metric,)}),
        limits=LONG,
    )  # fmt: skip
