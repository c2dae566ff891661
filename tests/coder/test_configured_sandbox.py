"""The sandbox of NANO_SANDBOX or nano.toml is that of every command that opens one."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Project, Runtime, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.tasks.task_file import write_tasks
from nano_shared.store import LogStore
from nano_shared.types import Split
from nano_suites.drawing import make_tasks

REFUSING = """
from nano_shared.errors import SandboxError

def refusing(python):
    raise SandboxError("this one was asked")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a task and a run of it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "boxes.py").write_text(REFUSING)
    tasks = make_tasks(levels=[0], n=1, seed=1, split=Split.TRAIN, views=["copy"])
    write_tasks(folder / "tasks.jsonl", tasks)
    with LogStore.open(folder / "log.db") as store:
        project = Project(directory=str(folder.resolve()))
        policy = ScriptedPolicy(["no"] * 9)
        run_task(tasks[0], Runtime(policy=policy, sandbox=open_sandbox(), store=store, project=project))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "rollout --tasks tasks.jsonl --oracle",
        "rollout --tasks tasks.jsonl",
        "tasks check tasks.jsonl",
        "tasks from-log last --check true",
        "tasks serve tasks.jsonl --port 1",
        "grade last",
        "grade --task tasks.jsonl --workspace .",
    ],
)
def test_it_is_asked_by(words: str, home: Path) -> None:
    env = {**os.environ, "NANO_HOME": str(home), "NANO_SANDBOX": f"{home}/boxes.py:refusing"}
    done = forked.run("nano-rl", *words.split(), env=env, cwd=home)
    assert "this one was asked" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 6
