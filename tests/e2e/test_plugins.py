"""The package in `examples/plugins`, installed beside nano into a fresh environment, used by its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
SUBMIT = '```action\n{"name": "submit", "arguments": {"answer": "14"}}\n```'
WEATHER = '```action\n{"name": "weather", "arguments": {"city": "Bonn"}}\n```'


class Installed:
    """The commands of a fresh environment, with data and working directory of their own."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("NANO_", "OPENAI_", "PYTHON"))}
        self._environment = kept | {
            "HOME": str(folder), "NANO_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def __call__(self, program: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.work, env=self._environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("fresh")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = ["wheel", "--no-deps", "--no-build-isolation", "-w", folder / "wheels"]
    ours = sorted(file.parent for file in (REPOSITORY / "plugins").glob("*/pyproject.toml"))
    subprocess.run([*pip, *built, REPOSITORY, *ours, REPOSITORY / "examples" / "plugins"], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    wheels = sorted((folder / "wheels").iterdir())
    fresh = ["--python", folder / "venv" / "bin" / "python", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *fresh, *wheels], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # what nano depends on is taken from where the tests run; nano itself is not on that path
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(folder)


def answers(nano: Installed, *texts: str) -> str:
    (nano.work / "answers.json").write_text(json.dumps(texts))
    return "answers:answers.json"


def test_a_run_calls_the_tool_in_the_dialect_and_the_sandbox_of_the_package(nano: Installed) -> None:
    project = nano.work / "project"
    project.mkdir()
    model = answers(nano, WEATHER, SUBMIT)
    done = nano(
        "nano-coder", "run", "How warm is Bonn?", "-C", "project", "--json", "--tool", "weather",
        "--model", model, "--profile", "fenced-1", "--sandbox", "announced", "--check", "true",
    )  # fmt: skip
    run = json.loads(done.stdout)["run"]
    shown = json.loads(nano("nano-coder", "log", "show", run, "--json").stdout)
    assert "Bonn: 14 C" in json.dumps(shown)
    assert "fenced-1+weather" in json.dumps(shown)
    assert "a jail with" in done.stderr
    prose = json.loads(nano("nano-coder", "log", "export", run, "--format", "prose").stdout)
    assert prose["text"].splitlines()[0] == "How warm is Bonn?"


def test_the_suite_is_listed_made_and_solved_with_its_tool(nano: Installed) -> None:
    assert "questions for a tool" in nano("nano-rl", "tasks", "list", "--suites").stdout
    nano("nano-rl", "tasks", "make", "--suite", "forecasts", "-n", "3", "--out", "tasks.jsonl")
    (row, *_) = [json.loads(line) for line in (nano.work / "tasks.jsonl").read_text().splitlines()]
    assert row["tools"] == ["weather", "submit"]
    assert "100" in nano("nano-rl", "rollout", "--tasks", "tasks.jsonl", "--oracle").stdout


def test_a_format_of_tasks_goes_both_ways(nano: Installed) -> None:
    (nano.work / "capitals.tsv").write_text("What is the capital of Peru?\tLima\n")
    nano("nano-rl", "tasks", "import", "capitals.tsv", "--from", "quiz", "--out", "quiz.jsonl")
    nano("nano-rl", "tasks", "export", "quiz.jsonl", "--to", "quiz", "--out", "again.tsv")
    assert (nano.work / "again.tsv").read_text() == (nano.work / "capitals.tsv").read_text()


def test_a_training_uses_the_reward_and_the_objective(nano: Installed) -> None:
    nano("nano-rl", "tasks", "make", "--suite", "forecasts", "-n", "2", "--out", "two.jsonl")
    code = (
        "from integration.tiny_model import build_tiny;"
        "build_tiny('tiny', ['@weather city=Bonn', '@submit', '14'], hidden=32, layers=1, vocab_size=300)"
    )
    nano("python", "-c", code)
    nano(
        "nano-rl", "train", "--name", "mine", "--model", "tiny", "--tasks", "two.jsonl", "--steps", "1",
        "--prompts", "1", "--group-size", "2", "--objective", "tanh", "--reward", "tests=1,thrift=0.5",
        "--limit", "max_turns=2", "--limit", "max_completion_tokens=4", "--tool", "weather",
    )  # fmt: skip
    folder = Path(nano.work.parent / "home")
    manifest = json.loads((folder / "checkpoints" / "mine" / "manifest.json").read_text())
    assert manifest["profile"] == "compact-1+weather"
    assert "tanh" in json.dumps(manifest["config"])
    assert "thrift" in (folder / "trainings" / "mine" / "metrics.jsonl").read_text()
