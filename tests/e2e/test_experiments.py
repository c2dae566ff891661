"""Scripts of integration/: each is imported, and calls our functions by keywords that they have."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "integration").glob("*.py"))
OURS = ("nano_", "integration.", *(path.stem for path in SCRIPTS))
sys.path.append(str(ROOT / "integration"))


def unknown_keywords(source: str, module: ModuleType) -> Iterator[str]:
    """Keywords of calls that the called function or class of ours does not take."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = resolved(node.func, module)
        if not callable(called) or not str(getattr(called, "__module__", "")).startswith(OURS):
            continue
        try:
            taken = inspect.signature(called).parameters
        except ValueError:  # an exception without a constructor of its own
            continue
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            continue
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in taken:
                yield f"line {node.lineno}: {ast.unparse(node.func)}({keyword.arg}=...)"


def resolved(node: ast.expr, module: ModuleType) -> Any:
    """What a name of the module, or a dotted one, stands for; None if that is known only when it runs."""
    if isinstance(node, ast.Name):
        return vars(module).get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, module), node.attr, None)
    return None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_calls_what_there_is(script: Path) -> None:
    module = importlib.import_module(script.stem)
    assert list(unknown_keywords(script.read_text(encoding="utf-8"), module)) == []


def test_a_keyword_that_is_gone_is_found() -> None:
    module = importlib.import_module("log_arms")
    source = "Sources(tasks=(), born={})\nBench(home, scale, seed=0, critic=None)\nprint(end='', flush=True)"
    assert list(unknown_keywords(source, module)) == [
        "line 1: Sources(born=...)",
        "line 2: Bench(critic=...)",
    ]
