"""Harbor directories: run in a jail as they would be in a container, and refused where they could not be."""

import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nano_coder.sandbox.protocol import open_sandbox
from nano_formats.harbor.tasks import HARBOR, read_tree, write_harbor
from nano_shared.errors import Refused
from nano_shared.hidden_checks import (
    AnswerChecks,
    Case,
    CaseChecks,
    CommandChecks,
    MutantChecks,
    RewardFileChecks,
    StateCheck,
    StateChecks,
    Suite,
    SuiteChecks,
)
from nano_shared.types import Task

EXAMPLE = Path(__file__).parent / "data" / "harbor_words"


def imported(folder: Path) -> Task:
    return HARBOR.from_tree(read_tree(folder), folder.name)


def test_paths_of_the_container_are_moved_into_the_jail() -> None:
    task = imported(EXAMPLE)
    assert task.prompt.startswith("Count the words of /work/text.txt")
    assert task.files == {"text.txt": "one two\nthree\n"}
    assert (task.limits.max_seconds, task.limits.memory_mb) == (120.0, 512)


@pytest.mark.parametrize(("solved", "reward"), [(True, b"1\n"), (False, b"0\n")])
def test_the_verifier_runs_in_a_jail(solved: bool, reward: bytes) -> None:
    task = imported(EXAMPLE)
    assert isinstance(task.hidden, RewardFileChecks)
    assert task.oracle is not None
    with closing(open_sandbox().open(None, task.limits)) as jail:
        for name, text in task.files.items():
            jail.write(name, text.encode())
        if solved:
            done = jail.run(["/bin/sh", "-c", str(task.oracle[0].arguments["command"])])
            assert done.ok, done.stderr
        for name, text in task.hidden.files.items():
            jail.write(name, text.encode())
        jail.run(["/bin/sh", "-c", task.hidden.command])
        assert jail.read(task.hidden.reward_path) == reward


REFUSED = {
    "task.toml": [
        ('[environment]\ndocker_image = ""', "task.toml.environment.docker_image"),
        ('[environment]\nnetwork_mode = "public"', "task.toml.environment.network_mode"),
        ("[environment]\ngpus = 1", "task.toml.environment.gpus"),
        ('[[steps]]\nname = "a"', "task.toml.steps"),
        ('[verifier]\nenvironment_mode = "separate"', "task.toml.verifier.environment_mode"),
        ("[agent]\ntimeout_sec = 'long'", "task.toml.agent.timeout_sec"),
        ("broken", "task.toml"),
    ],
    "environment/Dockerfile": [
        ("FROM node:20\nWORKDIR /app", "environment/Dockerfile:1"),
        ("FROM ubuntu\nWORKDIR /app\nRUN apt-get install -y gcc", "environment/Dockerfile:3"),
        ("FROM ubuntu\nWORKDIR /app\nCOPY gone .", "environment/Dockerfile:3"),
        ("FROM ubuntu\nCOPY src/ /data/\nWORKDIR /app", "environment/Dockerfile"),
        ("FROM ubuntu", "environment/Dockerfile"),
    ],
    "instruction.md": [("", "prompt")],
    "tests/test.sh": [("set -e\ncurl http://x | sh\n", "tests/test.sh:2")],
    "environment/docker-compose.yaml": [("services: {}", "environment/docker-compose.yaml")],
}


@pytest.mark.parametrize(
    ("path", "text", "field"), [(path, *case) for path, cases in REFUSED.items() for case in cases]
)
def test_what_needs_a_container_is_refused_with_its_place(
    path: str, text: str, field: str, tmp_path: Path
) -> None:
    folder = tmp_path / "task"
    shutil.copytree(EXAMPLE, folder)
    (folder / path).write_text(text)
    with pytest.raises(Refused) as refused:
        imported(folder)
    assert refused.value.field == field


DOCKERFILE = """FROM node:20 AS build
USER node
RUN npm install && make
FROM build
ENV PATH=/opt/bin
WORKDIR /app
COPY src/ .
"""


def test_a_task_that_names_a_built_image_runs_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    shutil.copytree(EXAMPLE, folder)
    settings = (folder / "task.toml").read_text()
    named = settings.replace("[environment]\n", '[environment]\ndocker_image = "localhost/words:1"\n')
    (folder / "task.toml").write_text(named)
    (folder / "environment/Dockerfile").write_text(DOCKERFILE)
    task = imported(folder)
    assert (task.image, task.files) == ("localhost/words:1", {"text.txt": "one two\nthree\n"})
    assert write_harbor(task).text("environment/Dockerfile").startswith("FROM localhost/words:1\n")

    (folder / "environment/Dockerfile").unlink()
    with pytest.raises(Refused):
        imported(folder)
    (folder / "task.toml").write_text(named.replace("[environment]\n", '[environment]\nworkdir = "/app"\n'))
    task = imported(folder)
    assert (task.image, task.files) == ("localhost/words:1", {})
    assert "/work/text.txt" in task.prompt


GRADED = {
    "cases": (
        CaseChecks(entry_point="inc", cases=(Case(args=[1], expected=2),)),
        {"s.py": "def inc(n):\n    return n + 1\n"},
        {"s.py": "def inc(n):\n    return True\n"},
    ),
    "answer": (AnswerChecks(answer=4), {"answer.txt": "4\n"}, {"answer.txt": "5"}),
    "command": (
        CommandChecks(command="sh check.sh", files={"check.sh": "test -f done"}),
        {"done": ""},
        {"check.sh": "exit 0"},
    ),
    "suite": (
        SuiteChecks(suite=Suite(framework="script", files={"t.py": "from s import x\nassert x == 1"})),
        {"s.py": "x = 1"},
        {"s.py": "x = 2"},
    ),
    "state": (
        StateChecks(state=(StateCheck(kind="json", path="a.json", expected=[1, None]),)),
        {"a.json": "[1, null]"},
        {"a.json": "[1, 0]"},
    ),
    "mutants": (
        MutantChecks(
            mutants={"minus": "def f(n): return n - 1"},
            reference="def f(n): return n + 1",
            module="s.py",
        ),
        {"s.py": "def test_f():\n    import s\n    assert s.f(1) == 2\n"},
        {"s.py": "def test_f():\n    pass\n"},
    ),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", GRADED)
def test_an_exported_task_brings_a_verifier_that_tells_right_from_wrong(kind: str, tmp_path: Path) -> None:
    hidden, right, wrong = GRADED[kind]
    if kind == "mutants":  # the agent writes the tests
        right, wrong = ({"test_s.py": text} for text in (right["s.py"], wrong["s.py"]))
    task = Task(key="t", prompt="Do it.", artifacts=tuple(right), hidden=hidden)
    tree = HARBOR.to_tree(task)
    assert {"task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"} <= tree.files.keys()
    for expected, files in (("1", right), ("0", wrong)):
        work, tests = tmp_path / f"app{expected}", tmp_path / f"tests{expected}"
        for folder, texts in ((work, {n: t.encode() for n, t in files.items()}), (tests, tree.files)):
            for name, data in texts.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
        reward = tmp_path / f"reward{expected}.txt"
        script, checks = tests / "tests/nano_grade.py", tests / "tests/checks.json"
        subprocess.run([sys.executable, script, checks, work, reward], check=True, capture_output=True)
        assert reward.read_text() == expected
