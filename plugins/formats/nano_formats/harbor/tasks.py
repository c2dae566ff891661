"""Harbor task directories: import of those that a jail or a container can run, export of any task.

Absolute paths of the container are mapped into the jail: the working directory becomes /work, and /tests,
/logs and /solution become folders in /tmp/harbor, which exists only while the verifier runs.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_formats.harbor import grade
from nano_formats.harbor.config import SCHEMA, HarborConfig, Image, read_config, read_dockerfile
from nano_formats.row_format import refusal, refuse_uncarried, whole, with_original
from nano_rl.task_formats import ReadOptions
from nano_shared.errors import Refusal, Refused, UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import CaseChecks, MutantChecks, RewardFileChecks, expects_answer
from nano_shared.strict_json import parse_json, refusing_invalid, to_json, validated
from nano_shared.types import Limits, OracleAction, Provenance, Task

MARKER, WHOLE_FILE = "task.toml", "nano_task.json"
_SKIPPED = frozenset({".git", "__pycache__", ".DS_Store"})


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of a folder by relative path, and which are executable."""

    files: dict[str, bytes]
    executable: frozenset[str] = frozenset()

    def text(self, path: str) -> str:
        """Raises Refused for a file that is missing or no text."""
        if path not in self.files:
            raise Refused(path, "is missing")
        try:
            return self.files[path].decode("utf-8")
        except UnicodeDecodeError:
            raise Refused(path, "is no text, which the files of a task must be") from None

    def below(self, folder: str) -> dict[str, str]:
        """The files of one folder as text, by their path in it. Raises Refused for one that is no text."""
        return {p[len(folder) + 1 :]: self.text(p) for p in self.files if p.startswith(f"{folder}/")}


class HarborTasks:
    """Folders are kept when they are imported, and exported unchanged. A folder written for a task of nano
    also holds the task in `nano_task.json`; an import refuses a folder in which only one of the two was
    edited."""

    name = "harbor"
    summary = "Harbor task directories"

    def recognises_path(self, path: Path) -> bool:
        return path.is_dir() and bool(self.folders(path))

    def folders(self, path: Path) -> list[Path]:
        """The task folders at or below a path; a task's own folder is not searched further."""
        if (path / MARKER).is_file():
            return [path]
        inner = sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink() and p.name != ".git")
        return [found for p in inner for found in self.folders(p)]

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        if not path.is_dir():
            raise UsageError(f"{path}: {self.name} tasks are folders with a {MARKER}")
        seen: dict[str, Path] = {}
        for folder in self.folders(path):
            try:
                task = self.from_tree(read_tree(folder), folder.resolve().name)
                if task.key in seen:
                    raise Refused("key", f"{task.key!r} is already the task in {seen[task.key]}")
            except Refused as problem:
                yield Refusal.of(str(folder), problem)
                continue
            seen[task.key] = folder
            yield task

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]:
        """The tasks that cannot be written, each with its reason."""
        return [problem for task in tasks if (problem := refusal(task, self.to_tree))]

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        """Give each task a folder. Raises Refused for the first that cannot be written, before any is."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} exists already; give --out a folder that is new or empty")
        trees = [(task.key, self.to_tree(task)) for task in tasks]
        for key, tree in trees:
            write_tree(path / folder_name(key), tree)

    def from_tree(self, tree: Tree, name: str) -> Task:
        """Raises Refused where the folder is malformed, or its files and its whole task disagree."""
        if WHOLE_FILE not in tree.files:
            with refusing_invalid():
                return with_original(read_harbor(tree, name), self.name, folder=name, **_packed(tree))
        task = validated(Task, parse_json(tree.text(WHOLE_FILE)), WHOLE_FILE)
        written = self.to_tree(task)
        for path, data in written.files.items():
            if tree.files.get(path) != data:
                raise Refused(path, f"is not what {WHOLE_FILE} says; change both, or remove {WHOLE_FILE}")
        if tree.files.keys() - written.files.keys():
            task = with_original(task, self.name, folder=name, **_packed(tree))
        return task

    def to_tree(self, task: Task) -> Tree:
        """Raises Refused with the field that this format cannot carry."""
        original = task.provenance.original or {}
        if original.get("format") == self.name:
            tree = _unpacked(original)
            if self._means(tree, str(original.get("folder")), task):
                return tree
        refuse_uncarried(task)
        tree = write_harbor(task)
        files = tree.files | {WHOLE_FILE: f"{whole(task)}\n".encode()}
        return Tree(files, tree.executable)

    def _means(self, tree: Tree, name: str, task: Task) -> bool:
        try:
            return whole(self.from_tree(tree, name)) == whole(task)
        except Refused:
            return False


def read_tree(folder: Path) -> Tree:
    """Every file of a folder. Raises Refused for a link or a special file, which no task can carry."""
    files: dict[str, bytes] = {}
    executable = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if _SKIPPED & set(name.split("/")):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(name, "is a link or a special file, which a task cannot carry")
        if path.is_file():
            files[name] = path.read_bytes()
            if os.access(path, os.X_OK) and path.stat().st_mode & 0o111:
                executable.add(name)
    return Tree(files, frozenset(executable))


def write_tree(folder: Path, tree: Tree) -> None:
    for name, data in tree.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name in tree.executable else 0o644)


def folder_name(key: str) -> str:
    """A name for the task's folder; two keys never share one."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", key).strip("-")[:80].lower()
    return plain if plain == key else f"{plain or 'task'}-{content_hash(key)[7:15]}"


def _packed(tree: Tree) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for path, data in tree.files.items():
        try:
            files[path] = data.decode("utf-8")
        except UnicodeDecodeError:
            files[path] = {"base64": base64.b64encode(data).decode()}
    return {"files": files, "executable": sorted(tree.executable)}


def _unpacked(original: Mapping[str, Any]) -> Tree:
    files = {
        path: text.encode() if isinstance(text, str) else base64.b64decode(text["base64"])
        for path, text in dict(original.get("files") or {}).items()
    }
    return Tree(files, frozenset(original.get("executable") or ()))


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
        "task.toml": tomli_w.dumps(_config(task)), "instruction.md": instruction,
        "environment/Dockerfile": _dockerfile(task, checks), "tests/test.sh": _TEST,
        "tests/checks.json": to_json(checks) + "\n",
        "tests/nano_grade.py": Path(grade.__file__).read_text(encoding="utf-8"),
        **{f"environment/files/{name}": text for name, text in task.files.items()},
    }  # fmt: skip
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
        provenance=Provenance(source=HarborTasks.name),
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
    """A command that places the tests, runs them, and writes the reward to the workspace."""
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


HARBOR = HarborTasks()
