"""Scripts of integration/: each calls our functions by keywords that they have, and its `--smoke` runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "integration").glob("*.py"))
OURS = ("nano_", "integration.", *(path.stem for path in SCRIPTS))
PARTS = {
    "engine_process",
    "judge_server",
    "log_arms",
    "negative_controls",
    "paired",
    "smoke",
    "tiny_model",
    "tool_calling_policy",
}
"""of the scripts, which are no scripts themselves"""
ELSEWHERE = {"container_image", "foreign_agent", "harbor_runs", "with_vllm"}
"""scripts that need what no wheel of ours brings: an image, agents of others, Harbor, vLLM"""
PROCESSES = 3
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PROCESSES))
def test_the_smallest_instance_of_each_script_runs(part: int) -> None:
    """Few processes for all of them, since importing torch takes longer than most."""
    names = sorted({script.stem for script in SCRIPTS} - PARTS)[part::PROCESSES]
    argv = [sys.executable, "integration/smoke.py", *names]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    results = {one["script"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert list(results) == names, done.stderr[-3000:]
    assert {name: one["said"] for name, one in results.items() if one["code"] != 0} == {}
    not_here = {name for name, one in results.items() if one["said"].startswith("cannot be tried here: ")}
    assert not_here <= ELSEWHERE
