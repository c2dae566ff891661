"""The tool `calculate`: exact arithmetic on the expression's syntax tree."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.process import parse_expression

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_LENGTH, _MAX_EXPONENT, _MAX_BITS = 500, 1000, 10_000


def _round(number: Any, digits: Any = None) -> Any:
    if digits is not None and abs(digits) > _MAX_EXPONENT:
        # it would compute a power of ten of that size
        raise ValueError(f"round takes up to {_MAX_EXPONENT} digits")
    return round(number, digits)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "round": _round}


@tool(body="expression")
def calculate(context: ToolContext, expression: str) -> ToolResult:
    """Evaluate an arithmetic expression: + - * / // % ** ( ) abs min max round."""
    if len(expression) > _MAX_LENGTH:
        raise ToolFailure(f"the expression is longer than {_MAX_LENGTH} characters")
    try:
        value = _value(parse_expression(expression.strip()).body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as problem:
        raise ToolFailure(f"cannot calculate {expression.strip()!r}: {problem}") from None
    return ToolResult(text=str(value))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_binary(op, _value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(arg) for arg in args))
    raise ValueError(f"only numbers and + - * / // % ** are allowed, not {ast.unparse(node)!r}")


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and abs(right) > _MAX_EXPONENT:
        raise ValueError(f"exponents go up to {_MAX_EXPONENT}")
    integers = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow) and integers and (left.bit_length() - 1) * right > _MAX_BITS:
        raise ValueError("the result is too large")
    return _BINARY[type(op)](left, right)


def _bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the result is too large")
    return value
