"""Tasks to write tests: a function on its own, right, and graded by mutants of it that the tests must notice.

The function is cut out of its module with all that it uses there. The oracle's tests are calls that the
package's own tests made, with what they returned; only mutants that these notice are hidden in the task.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nano_coder.grading.grade import Delivery, grade_delivery
from nano_coder.sandbox.protocol import Sandbox
from nano_mining.targets import first_line
from nano_rl.tasks.mutate import mutants
from nano_shared import snapshot
from nano_shared.blobs import MemoryBlobs
from nano_shared.files import content_hash
from nano_shared.hidden_checks import MutantChecks
from nano_shared.process import parse
from nano_shared.types import Limits, OracleAction, Task, Verdict

MODULE, TESTS = "subject.py", "test_subject.py"
_TRIED, _KEPT, _FEWEST = 8, 4, 2
"""mutants that are tried, that a task hides at most, and at least"""
_MOST_CLAIMS = 12
_LARGEST = 12_000
"""characters of the function with what it uses"""
_PROMPT = (
    f"`{MODULE}` holds the function `{{name}}`. Write tests of it in `{TESTS}` for pytest: they must pass on"
    " it as it is, and fail on versions of it with one small mistake, which you do not see."
)


def admitted_test_task(
    text: str, name: str, claims: Sequence[str], described: Mapping[str, Any], sandbox: Sandbox
) -> tuple[Task | None, str | None]:
    """(task, None), or (None, why not): the oracle's tests must pass on it and notice each mutant."""
    source = cut_out(text, name)
    if source is None:
        return None, "it does not stand alone"
    found = mutants(source, name)
    tried = {f"change_{n}": found[n * len(found) // _TRIED].source for n in range(min(_TRIED, len(found)))}
    body = "".join(f"    {claim}\n" for claim in claims[:_MOST_CLAIMS])
    tests = f"from {MODULE.removesuffix('.py')} import {name}\n\n\ndef test_{name}():\n{body}"
    if len(tried) < _FEWEST:
        return None, "it has too few mutants"
    first = _graded(_task(source, name, tried, tests, described), tests, sandbox)
    noticed = [n for n in tried if first is not None and first.checks.get(f"killed_{n}") == "pass"]
    if first is None or first.checks.get("reference") != "pass" or len(noticed) < _FEWEST:
        return None, "its calls with plain values do not pass on it, or notice too few mutants"
    task = _task(source, name, {n: tried[n] for n in noticed[:_KEPT]}, tests, described)
    right, empty = (_graded(task, left, sandbox) for left in (tests, f"def test_{name}():\n    pass\n"))
    rewards = [verdict.reward if verdict is not None else None for verdict in (right, empty)]
    return (task, None) if rewards == [1, 0] else (None, f"the oracle's tests and empty ones earn {rewards}")


def _task(source: str, name: str, wrong: Mapping[str, str], tests: str, described: Mapping[str, Any]) -> Task:
    prompt = _PROMPT.format(name=name)
    digest = content_hash([prompt, source]).removeprefix("sha256:")[:16]
    write = OracleAction(name="write_file", arguments={"path": TESTS, "content": tests})
    return Task(
        key=f"mined-test-{digest}", prompt=prompt, files={MODULE: source}, artifacts=(TESTS,),
        limits=Limits(), hidden=MutantChecks(mutants=dict(wrong), reference=source, module=MODULE),
        oracle=(write, OracleAction(name="submit")), **described,
    )  # fmt: skip


def _graded(task: Task, tests: str, sandbox: Sandbox) -> Verdict | None:
    blobs = MemoryBlobs()
    before, after = (
        snapshot.load(snapshot.snapshot_texts(files, blobs), blobs)
        for files in (task.files, {**task.files, TESTS: tests})
    )
    return grade_delivery(task, Delivery(before=before, after=after, blobs=blobs), sandbox)


def cut_out(text: str, name: str) -> str | None:
    """The top-level function with the statements of its module that it needs, in their order.

    None for a method, for one that needs another module of its package, and for what is too long.
    """
    body = parse(text).body
    binding = [(node, _bound(node)) for node in body]
    needed = {
        n for n, node in enumerate(body) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    }
    waiting = {name}
    known: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        known.add(wanted)
        for number, (node, names) in enumerate(binding):
            if wanted in names and number not in needed:
                needed.add(number)
                waiting |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - known
    nodes = [body[n] for n in sorted(needed)]
    single = any(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes)
    lines = text.split("\n")
    source = "\n\n\n".join("\n".join(lines[first_line(n) - 1 : n.end_lineno]) for n in nodes) + "\n"
    return source if single and len(source) <= _LARGEST and not any(map(_needs_package, nodes)) else None


def _needs_package(node: ast.stmt) -> bool:
    """Whether a statement imports anything that is not of the standard library."""
    for part in ast.walk(node):
        names = [alias.name for alias in part.names] if isinstance(part, ast.Import) else []
        if isinstance(part, ast.ImportFrom):
            names = ["" if part.level else part.module or ""]
        if any(name.split(".")[0] not in sys.stdlib_module_names for name in names):
            return True
    return False


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    inside = [*ast.walk(node)]
    stored = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    imported = [_bound(n) for n in inside if isinstance(n, ast.Import | ast.ImportFrom)]
    return stored.union(*imported)
