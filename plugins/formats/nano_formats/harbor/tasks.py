"""Harbor task directories: import of those that a jail or a container can run, export of any task.

Absolute paths of the container are mapped into the jail: the working directory becomes /work, and /tests,
/logs and /solution become folders in /tmp/harbor, which exists only while the verifier runs.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_formats.folder_format import FolderFormat, Tree, folder_name
from nano_formats.harbor import grade
from nano_formats.harbor.config import SCHEMA, HarborConfig, Image, read_config, read_dockerfile
from nano_shared.errors import Refused
from nano_shared.hidden_checks import CaseChecks, MutantChecks, RewardFileChecks, expects_answer
from nano_shared.strict_json import to_json
from nano_shared.types import Limits, OracleAction, Provenance, Task

_LEFT_OUT = {"cases": {"metrics"}, "answer": {"scorer"}, "suite": {"entry_point"}}
"""kind -> fields of the hidden checks that the verifier does not read"""
_PYTEST = "RUN pip install --no-cache-dir pytest==8.4.1\n"
_ANSWER = f"\n\nWrite your answer to /app/{grade.ANSWER}."
_TEST = """#!/bin/bash
python3 /tests/nano_grade.py /tests/checks.json /app /logs/verifier/reward.txt
"""


def write_harbor(task: Task) -> Tree:
    """Raises Refused for a task that the verifier could not grade in a container."""
    import tomli_w

    checks = _checks(task)
    instruction = task.prompt + (_ANSWER if expects_answer(task.hidden) else "")
    files = {
        "task.toml": tomli_w.dumps(_config(task)),
        "instruction.md": instruction,
        "environment/Dockerfile": _dockerfile(task, checks),
        "tests/test.sh": _TEST,
        "tests/checks.json": to_json(checks) + "\n",
        "tests/nano_grade.py": Path(grade.__file__).read_text(encoding="utf-8"),
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
    return f"FROM {task.image or 'python:3.11-slim'}\n{_PYTEST if pytest else ''}WORKDIR /app\n{copy}"


def _checks(task: Task) -> dict[str, Any]:
    """The input of the verifier; `kind` names its grader."""
    hidden = task.hidden
    if hidden is None and task.check is None:
        raise Refused("hidden", "nothing says how the task is graded, and Harbor needs a verifier")
    if hidden is None:
        return {"kind": "command", "command": task.check, "files": {}}
    if isinstance(hidden, CaseChecks) and hidden.metrics:
        raise Refused("hidden.metrics", "bounds on the syntax tree are measured by nano only")
    if isinstance(hidden, CaseChecks | MutantChecks) and not task.artifacts:
        raise Refused("artifacts", f"names no file that checks of kind {hidden.kind!r} could grade")
    checks = hidden.model_dump(mode="json", exclude=_LEFT_OUT.get(hidden.kind))
    if isinstance(hidden, CaseChecks):
        checks["target"] = task.artifacts[0]
    if isinstance(hidden, MutantChecks):
        checks["tests"] = list(task.artifacts)
    return checks


def _script(oracle: tuple[OracleAction, ...]) -> str | None:
    """The oracle as a shell script; None if an action has no equivalent in a shell."""
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
                lines.append(f"printf %s {shlex.quote(given['answer'])} > {grade.ANSWER}")
        else:
            return None
    return "\n".join(lines) + "\n"


NAME = "harbor"
PLACE = "/tmp/harbor"
TESTS, REWARD = ".harbor-tests", ".harbor-reward"
_FETCHES = re.compile(
    r"^\s*(?:sudo\s+)?(?:\S+=\S+\s+)*"
    r"(apt-get|apt|apk|yum|dnf|curl|wget|uvx?|npm|docker|git\s+clone|(?:python3?\s+-m\s+)?pip3?\s+install)\b"
)


def read_harbor(tree: Tree, name: str) -> Task:
    config = read_config(tree.text("task.toml"))
    image = _image(tree, config)
    tests = tree.below("tests")
    if "test.sh" not in tests:
        raise Refused("tests/test.sh", "is missing, and nothing else writes the reward")
    for path, text in tests.items():
        if path != "Dockerfile":
            _refuse_fetching(f"tests/{path}", text)
    inside = {"/tests": f"{PLACE}/tests", "/logs": f"{PLACE}/logs", "/solution": f"{PLACE}/solution"}
    inside[image.workdir] = "/work"
    seconds = config.agent.timeout_sec
    limits = {"max_seconds": seconds, "memory_mb": config.environment.memory_mb}
    return Task(
        key=config.task.name if config.task else name,
        prompt=moved(tree.text("instruction.md"), inside),
        files=image.files,
        image=config.environment.docker_image,
        limits=Limits(**{key: value for key, value in limits.items() if value is not None}),
        hidden=RewardFileChecks(
            command=_command(config.verifier.env),
            files={f"{TESTS}/{path}": moved(text, inside) for path, text in tests.items()},
            reward_path=REWARD,
        ),
        oracle=_oracle(tree, inside),
        provenance=Provenance(source=NAME),
    )


def moved(text: str, inside: Mapping[str, str]) -> str:
    """The text with absolute paths of the container replaced by those in the jail."""
    longest_first = sorted(inside, key=len, reverse=True)
    pattern = "|".join(re.escape(path) for path in longest_first)
    return re.sub(rf"(?<![\w.~}}/-])({pattern})(?![\w-]|\.\w)", lambda found: inside[found[1]], text)


def _image(tree: Tree, config: HarborConfig) -> Image:
    services = [path for path in tree.files if posixpath.basename(path).startswith("docker-compose")]
    if services:
        raise Refused(services[0], "starts services, which needs Docker")
    place = config.environment
    if "environment/Dockerfile" not in tree.files:
        if place.docker_image and place.workdir:
            return Image(posixpath.normpath(place.workdir), {})
        raise Refused("environment/Dockerfile", "is missing, so nothing says what the agent starts with")
    if "environment/.dockerignore" in tree.files:
        raise Refused("environment/.dockerignore", "chooses what is copied, which needs Docker")
    image = read_dockerfile(
        tree.text("environment/Dockerfile"), tree.below("environment"), "environment/Dockerfile",
        built=place.docker_image is not None,
    )  # fmt: skip
    if place.workdir not in (None, image.workdir):
        raise Refused("task.toml.environment.workdir", "is not the working directory of the Dockerfile")
    return image


def _refuse_fetching(path: str, text: str) -> None:
    for number, line in enumerate(text.split("\n"), start=1):
        if path.endswith(".sh") and (found := _FETCHES.match(line)):
            raise Refused(f"{path}:{number}", f"calls `{found[1]}`, which needs a network")


def _command(env: Mapping[str, str]) -> str:
    """A command that places the tests as in the container, runs them, and writes the reward to the
    workspace."""
    settings = "".join(f"{key}={shlex.quote(value)} " for key, value in sorted(env.items()))
    verifier = f"{PLACE}/logs/verifier"
    return (
        f"rm -rf {PLACE} {REWARD} && mkdir -p {verifier} {PLACE}/logs/agent {PLACE}/logs/artifacts"
        f" && cp -R {TESTS} {PLACE}/tests && rm -rf {TESTS} && cd /work"
        f" && {{ {settings}bash {PLACE}/tests/test.sh;"
        f" cp {verifier}/reward.json {REWARD} 2>/dev/null || cp {verifier}/reward.txt {REWARD}; }}"
    )


def _oracle(tree: Tree, inside: Mapping[str, str]) -> tuple[OracleAction, ...] | None:
    """The solution as one shell action: its files exist only while it runs."""
    scripts = tree.below("solution")
    if "solve.sh" not in scripts:
        return None
    folder = f"{PLACE}/solution"
    lines = [f"rm -rf {folder}"]
    for path, text in sorted(scripts.items()):
        target = f"{folder}/{path}"
        lines.append(f"mkdir -p {shlex.quote(posixpath.dirname(target))}")
        lines.append(f"printf %s {shlex.quote(moved(text, inside))} > {shlex.quote(target)}")
    run = OracleAction(name="shell", arguments={"command": "\n".join([*lines, f"bash {folder}/solve.sh"])})
    return run, OracleAction(name="submit")


HARBOR = FolderFormat(
    name=NAME,
    summary="Harbor task directories",
    marker="task.toml",
    read_tree=read_harbor,
    write_tree=write_harbor,
)
