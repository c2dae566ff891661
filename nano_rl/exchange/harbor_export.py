"""A task as a Harbor directory: a plain image, the starting files, and a verifier that needs no nano."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nano_rl.exchange import harbor_grade
from nano_rl.exchange.folder_format import Tree, folder_name
from nano_rl.exchange.harbor_config import SCHEMA
from nano_rl.exchange.jsonl import to_json
from nano_rl.exchange.refusal import Refused
from nano_shared.types import HiddenChecks, OracleAction, Task

_PYTEST = "RUN pip install --no-cache-dir pytest==8.4.1\n"
_ANSWER = f"\n\nWrite your answer to /app/{harbor_grade.ANSWER}."
_TEST = """#!/bin/bash
python3 /tests/nano_grade.py /tests/checks.json /app /logs/verifier/reward.txt
"""


def write_harbor(task: Task) -> Tree:
    """Raises Refused for a task that the verifier could not grade in a container."""
    import tomli_w

    checks = _checks(task)
    instruction = task.prompt + (_ANSWER if _answers(task) else "")
    files = {
        "task.toml": tomli_w.dumps(_config(task)),
        "instruction.md": instruction,
        "environment/Dockerfile": _dockerfile(task, checks),
        "tests/test.sh": _TEST,
        "tests/checks.json": to_json(checks) + "\n",
        "tests/nano_grade.py": Path(harbor_grade.__file__).read_text(encoding="utf-8"),
        **{f"environment/files/{name}": text for name, text in task.files.items()},
    }
    if task.oracle and (script := _script(task.oracle)):
        files["solution/solve.sh"] = script
    scripts = frozenset({"tests/test.sh", "solution/solve.sh"} & files.keys())
    return Tree({path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}, scripts)


def _config(task: Task) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA,
        "task": {"name": f"nano/{folder_name(task.key)}", "keywords": [task.view] if task.view else []},
        "metadata": {"source": task.provenance.source}
        | ({} if task.level is None else {"level": task.level}),
        "agent": {"timeout_sec": task.limits.max_seconds},
        "verifier": {"timeout_sec": 600.0},
        "environment": {"network_mode": "no-network", "memory_mb": task.limits.memory_mb, "workdir": "/app"},
    }


def _dockerfile(task: Task, checks: dict[str, Any]) -> str:
    pytest = "pytest" in to_json(checks) or checks["kind"] == "mutants"
    copy = "COPY files/ /app/\n" if task.files else ""
    return f"FROM python:3.11-slim\n{_PYTEST if pytest else ''}WORKDIR /app\n{copy}"


def _answers(task: Task) -> bool:
    hidden = task.hidden
    return hidden is not None and (
        hidden.kind == "answer" or any(fact.kind == "answer" for fact in hidden.state)
    )


def _checks(task: Task) -> dict[str, Any]:
    """What the verifier reads; `kind` names its grader."""
    hidden = task.hidden
    if hidden is None and task.check is None:
        raise Refused("hidden", "nothing says how the task is graded, and Harbor needs a verifier")
    if hidden is None:
        return {"kind": "command", "command": task.check, "files": {}}
    if hidden.metrics:
        raise Refused("hidden.metrics", "bounds on the syntax tree are measured by nano only")
    if hidden.kind in ("cases", "mutants") and not task.artifacts:
        raise Refused("artifacts", f"names no file that checks of kind {hidden.kind!r} could grade")
    return {"kind": hidden.kind, **_needed(task, hidden)}


def _needed(task: Task, hidden: HiddenChecks) -> dict[str, Any]:
    stored = hidden.model_dump(mode="json")
    names = {
        "answer": ("answer",),
        "cases": ("entry_point", "cases"),
        "command": ("command", "files"),
        "reward_file": ("command", "files", "reward_path"),
        "suite": ("suite",),
        "state": ("state",),
        "mutants": ("mutants", "reference", "module"),
    }[hidden.kind]
    extra: dict[str, Any] = {}
    if hidden.kind == "cases":
        extra = {"target": task.artifacts[0]}
    if hidden.kind == "mutants":
        extra = {"tests": list(task.artifacts)}
    return {name: stored[name] for name in names} | extra


def _script(oracle: tuple[OracleAction, ...]) -> str | None:
    """The oracle as a shell script; None where an action has no counterpart outside this runtime."""
    lines = ["#!/bin/bash", "set -e", "cd /app"]
    for action in oracle:
        given = {key: str(value) for key, value in action.arguments.items() if value is not None}
        if action.name == "write_file":
            path = shlex.quote(given["path"])
            lines += [f'mkdir -p "$(dirname {path})"', f"printf %s {shlex.quote(given['content'])} > {path}"]
        elif action.name == "shell":
            lines.append(given["command"])
        elif action.name == "submit":
            if "answer" in given:
                lines.append(f"printf %s {shlex.quote(given['answer'])} > {harbor_grade.ANSWER}")
        else:
            return None
    return "\n".join(lines) + "\n"
