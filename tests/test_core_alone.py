"""The core without any plug-in: it runs, and says which plug-in brings what is asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CORE_TESTS = (
    "tests/coder/test_agent.py", "tests/coder/test_runtime.py", "tests/coder/test_dialects.py",
    "tests/coder/test_given_tools.py", "tests/rl/test_loss.py", "tests/rl/test_advantage.py",
    "tests/rl/test_objectives.py",
)  # fmt: skip
IMPORT_ALL = """
import importlib, pathlib, sys
for package in ("shared/nano_shared", "nano_coder", "nano_rl"):
    for file in sorted(pathlib.Path(package).rglob("*.py")):
        parts = file.relative_to("shared" if package.startswith("shared") else ".").with_suffix("").parts
        if {"inside", "migrations", "__main__"} & set(parts):
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module
found = [name for name in sys.modules if name.partition(".")[0] in sys.argv[1:]]
assert not found, found
"""
MAIN = "import sys; from nano_{}.cli import main; main()"
# each command in a fork: the imports are made once
REFUSALS = """
import importlib, json, os, sys
mains = {program: importlib.import_module(f"nano_{program}.cli").main for program in ("coder", "rl")}
for program, words in json.loads(sys.argv[1]):
    end, told = os.pipe()
    if os.fork() == 0:
        os.dup2(told, 2)
        sys.argv, code = ["nano-" + program, *words.split()], 1
        try:
            mains[program]()
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(told)
    with open(end) as pipe:
        said = pipe.read()
    print(json.dumps([program, words, os.waitstatus_to_exitcode(os.wait()[1]), said]))
"""
PLUGINS = sorted(folder.name for folder in (REPOSITORY / "plugins").glob("*/nano_*"))


class Alone:
    """A copy of the core, and of what it depends on all but our plug-ins, for an interpreter of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "core"
        self.folder.mkdir()
        for part in ("nano_coder", "nano_rl", "shared", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / part, self.folder / part, ignore=ignored)
        shutil.copy(REPOSITORY / "pyproject.toml", self.folder)
        site, farm = Path(sysconfig.get_path("purelib")), folder / "site"
        farm.mkdir()
        for entry in site.iterdir():
            ours = entry.name.startswith(("nano_rl_coder-", "nano_rl_coder_", "_nano_rl_coder"))
            if not (entry.suffix == ".pth" or ours) or entry.name.startswith("nano_rl_coder-"):
                (farm / entry.name).symlink_to(entry)
        path = os.pathsep.join(map(str, (self.folder, self.folder / "shared", farm)))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NANO_")}
        self._environment = kept | {
            "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NANO_HOME": str(folder / "home"),
        }  # fmt: skip
        self._python = getattr(sys, "_base_executable", sys.executable)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._python, "-S", *arguments],  # the interpreter's own packages are none of ours
            cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    made = Alone(tmp_path_factory.mktemp("alone"))
    (made.folder / "tasks.jsonl").write_text('{"key": "a", "prompt": "Do it.", "check": "true"}\n')
    (made.folder / "published.jsonl").write_text('{"id": "a", "prompt": "Do it.", "tests": {}}\n')
    suite = {"framework": "script", "files": {"check.py": "import sol\n"}}
    hidden = {"kind": "suite", "suite": suite}
    oracle = [{"name": "submit", "arguments": {}}]
    row = {"key": "a", "prompt": "Do it.", "artifacts": ["sol.py"], "hidden": hidden, "oracle": oracle}
    (made.folder / "suite.jsonl").write_text(json.dumps(row) + "\n")
    (made.folder / "work").mkdir()
    return made


def test_every_module_of_the_core_is_imported_without_a_plugin(alone: Alone) -> None:
    done = alone("-c", IMPORT_ALL, *PLUGINS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.slow
def test_the_core_works_without_a_plugin(alone: Alone) -> None:
    done = alone("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *CORE_TESTS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


BROUGHT = [
    ("coder", "view", "view"),
    ("coder", "run x --profile native-1-mistral", "formats"),
    ("coder", "serve", "apis"),
    ("coder", "tools --tool fetch_url", "web"),
    ("coder", "mcp list", "mcp"),
    ("coder", "exec -- true", "jails"),
    ("coder", "doctor", "jails"),
    ("coder", "log stats", "logs"),
    ("coder", "feedback --good", "logs"),
    ("coder", "run x --sandbox podman", "containers"),
    ("rl", "report x", "view"),
    ("rl", "conformance", "conformance"),
    ("rl", "cluster status", "cluster"),
    ("rl", "dpo", "preferences"),
    ("rl", "preferences build", "preferences"),
    ("rl", "tasks mine .", "mining"),
    ("rl", "tasks serve x", "formats"),
    ("rl", "tasks make --suite sql", "suites"),
    ("rl", "tasks list --suites", "suites"),
    ("rl", "tasks import x --from harbor --out y", "formats"),
    ("rl", "tasks export x --to trl --out y", "formats"),
    ("rl", "export", "formats"),
    ("rl", "checkpoints export x --to y", "formats"),
    ("rl", "tasks check x", "mining"),
    ("rl", "tasks list x", "suites"),
    ("rl", "plan", "plan"),
    ("rl", "train --name x --tasks tasks.jsonl --log-to wandb", "view"),
    ("rl", "train --name x --tasks tasks.jsonl --reward tests=1", "preferences"),
    ("rl", "eval --tasks published.jsonl", "formats"),
    ("rl", "grade --task suite.jsonl --workspace work", "graders"),
    ("rl", "rollout --tasks suite.jsonl --oracle", "graders"),
]


@pytest.fixture(scope="module")
def refusals(alone: Alone) -> dict[tuple[str, str], tuple[int, str]]:
    """program, words -> exit code and stderr of the command."""
    done = alone("-c", REFUSALS, json.dumps([(program, words) for program, words, _ in BROUGHT]))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(program, words): (code, said) for program, words, code, said in lines}


@pytest.mark.parametrize(("program", "words", "plugin"), BROUGHT)
def test_what_a_plugin_brings_is_named_with_it(
    program: str, words: str, plugin: str, refusals: dict[tuple[str, str], tuple[int, str]]
) -> None:
    code, said = refusals[program, words]
    assert code in (2, 3), said
    assert f"pip install 'nano-rl-coder[{plugin}]'" in said
    assert len(said.splitlines()) == 1


def test_a_setting_of_a_missing_plugin_is_named_with_it(alone: Alone) -> None:
    (alone.folder / "home").mkdir(exist_ok=True)
    (alone.folder / "nano.toml").write_text('[mcp.servers.x]\ncommand = "y"\n')
    try:
        done = alone("-c", MAIN.format("coder"), "config", "show")
    finally:
        (alone.folder / "nano.toml").unlink()
    assert done.returncode in (0, 2, 3)
    assert "Traceback" not in done.stderr
