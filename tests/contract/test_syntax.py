"""Trees of source that threads parse at once."""

from __future__ import annotations

import ast
import gc
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nano_shared.process import parse, parse_expression

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(
    f"def f{n}(a, b=({n}, [a, {{'x': (1, 2, (3, 4))}}])):\n    return a + b * ({n} + (a or (b and a < b)))"
    for n in range(100)
)


def in_threads(work: Callable[[], object]) -> list[str]:
    """What SystemErrors said while four threads did the work; another thread's turn may come at any
    collection of garbage, and they are frequent."""
    failures: list[str] = []

    def go() -> None:
        for _ in range(8):
            try:
                work()
            except SystemError as problem:
                failures.append(str(problem))

    def give_way(*_: object) -> None:
        time.sleep(0)

    threads = [threading.Thread(target=go) for _ in range(4)]
    threshold = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(20)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(give_way)
    return failures


@pytest.mark.slow
def test_threads_parse_at_once() -> None:
    assert in_threads(lambda: parse(SOURCE)) == []
    assert in_threads(lambda: parse_expression(f"[{'(1, [2, (3,)]), ' * 200}]")) == []


def test_the_trees_are_those_of_ast() -> None:
    assert ast.dump(parse(SOURCE)) == ast.dump(ast.parse(SOURCE))
    assert ast.dump(parse_expression("a + 1")) == ast.dump(ast.parse("a + 1", mode="eval"))
    with pytest.raises(SyntaxError):
        parse("def")


def test_the_library_parses_by_nothing_else() -> None:
    found = [
        str(path.relative_to(ROOT))
        for package in ("nano_coder", "nano_rl", "shared/nano_shared")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "inside" not in path.parts and re.search(r"\bast\.parse\(", path.read_text("utf-8"))
    ]
    assert found == ["shared/nano_shared/process.py"]
