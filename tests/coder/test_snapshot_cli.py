"""diff --at, undo and restore: any step of a run can be looked at and gone back to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from executions import a_runtime, act

from nano_coder.agent.profiles import HERMES_1
from nano_coder.cli import cli as nano_coder
from nano_coder.commands.options import Setup
from nano_coder.commands.run import make_task, take_snapshot
from nano_coder.config import AgentConfig, load_config
from nano_coder.run.execution import Runtime, run_task
from nano_coder.serve.given_reward import give_reward
from nano_shared.command_line import run_command
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import Task, Trajectory

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
EDIT = "echo two > a.py; chmod 755 a.py; mkdir -p made/empty; echo b > made/b.py"
CLEAN = "rm old.txt; rmdir hollow; ln -s a.py link; printf '\\0\\377' > \"$(printf 'n\\377')\""
SCRIPT = [
    act("shell", HERMES_1, command=EDIT),
    "This step only thinks.",
    act("shell", HERMES_1, command=CLEAN),
    act("submit", HERMES_1, answer="ok"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def cli(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    for name in [name for name in os.environ if name.startswith("NANO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NANO_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ended:
            run_command(nano_coder, list(arguments))
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(arguments, ended.value.code, printed.out, printed.err)

    return call


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in (".git", ".venv", "hollow"):
        (folder / name).mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (folder / "a.py").write_text("one\n")
    (folder / "old.txt").write_text("old\n")
    return folder


def a_task_of(prompt: str, project: Path, config: AgentConfig, runtime: Runtime) -> Task:
    setup = Setup(config, {}, project)
    return make_task(prompt, take_snapshot(setup, runtime.store), setup, runtime)


@pytest.fixture
def run(project: Path, home: Path) -> Trajectory:
    runtime = a_runtime(home, SCRIPT, profile=HERMES_1)
    task = a_task_of("Say two.", project, AgentConfig(max_turns=10), runtime)
    with runtime.store:
        trajectory = run_task(task, runtime)
    assert [bool(turn.snapshot) for turn in trajectory.turns] == [True, False, True, True]
    return trajectory


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything there: a link's target, nothing of a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else b""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (mode, content)
    return found


def logged(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What of a folder a log holds: no version control, no environments."""
    return {path: node for path, node in tree(folder).items() if not path.startswith((".git", ".venv"))}


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr, nothing on stdout, bad input."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == [], line
    assert (done.returncode, done.stdout) == (2, "")


# ------------------------------------------------------------------------------------ diff --at


def test_a_diff_is_of_the_step_that_log_show_calls_so(cli: Cli, run: Trajectory) -> None:
    shown = cli("log", "show", run.id).stdout
    assert "rm old.txt" in shown[shown.index("step 3") : shown.index("step 4")]
    texts = [cli("diff", run.id, "--at", str(step)).stdout for step in range(5)]
    assert texts[0] == ""
    assert "+two" in texts[1]
    assert "old.txt" not in texts[1]
    assert texts[2] == texts[1]
    assert "deleted file mode" in texts[3]
    assert texts[4] == texts[3] == cli("diff", run.id).stdout


def test_a_diff_into_a_pipe_is_a_patch_for_git(cli: Cli, run: Trajectory, project: Path) -> None:
    assert "Binary files" in run.diff
    patch = cli("diff", run.id).stdout
    assert "GIT binary patch" in patch
    subprocess.run(["git", "apply", "--unsafe-paths"], cwd=project, input=patch, text=True, check=True)
    assert (project / os.fsdecode(b"n\xff")).read_bytes() == b"\0\xff"


def test_a_reward_that_was_given_is_not_called_a_check(cli: Cli, run: Trajectory, home: Path) -> None:
    with LogStore.open(home / "log.db") as store:
        give_reward(store, [run.id], 1.0, {"taste": 1.0})
    shown = cli("log", "show", run.id).stdout
    assert "check: none was run; the session's client or feedback gave the reward 1 (taste 1)" in shown
    assert "original tests" not in shown


@pytest.mark.some(1)
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_no_traceback(closed: tuple[int, ...], cli: Cli, run: Trajectory) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    code = "from nano_coder.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "log", "list"], capture_output=True, text=True, preexec_fn=close
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (run.id in done.stdout) == (1 not in closed)


def test_a_run_that_was_killed_has_a_diff(cli: Cli, run: Trajectory, home: Path) -> None:
    killed = run.model_copy(update={"id": new_run_id(), "stop": None, "ended": None, "diff": "", "turns": ()})
    with LogStore.open(home / "log.db") as store:
        store.begin(killed)
        for turn in run.turns:
            store.append_turn(killed.id, turn)
    assert cli("diff", killed.id).stdout == cli("diff", run.id).stdout


# ------------------------------------------------------------------------------------ undo


def test_undo_takes_back_all_that_apply_did(cli: Cli, run: Trajectory, project: Path) -> None:
    was, here = tree(project), ("-C", str(project))
    applied = cli("apply", run.id, *here)
    assert "made/b.py" in tree(project)
    undone = cli("undo", run.id, *here)
    assert (undone.returncode, undone.stdout, undone.stderr) == (0, applied.stdout, "")
    assert "\nn\\udcff" in undone.stdout
    assert tree(project) == was
    again = cli("undo", run.id, *here)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", f"nothing to undo in {project}\n")


def test_undo_goes_back_step_by_step(cli: Cli, run: Trajectory, project: Path, tmp_path: Path) -> None:
    was, here = tree(project), ("-C", str(project))
    cli("apply", run.id, *here)
    for step in (3, 1, 0):
        assert cli("undo", run.id, "--to", str(step), *here).returncode == 0
        copy = tmp_path / f"after-{step}"
        assert cli("restore", run.id, "--at", str(step), "--to", str(copy)).returncode == 0
        assert logged(project) == tree(copy)
    assert tree(project) == was


def test_undo_leaves_the_users_own_edits_alone(cli: Cli, run: Trajectory, project: Path) -> None:
    cli("apply", run.id, "-C", str(project))
    (project / "mine.txt").write_text("mine\n")
    (project / "made" / "mine.txt").write_text("mine\n")
    assert cli("undo", run.id, "-C", str(project)).returncode == 0
    assert (project / "a.py").read_text() == "one\n"
    assert {path for path in logged(project) if "m" in path} == {"mine.txt", "made", "made/mine.txt"}


def test_a_file_that_changed_since_stops_undo(cli: Cli, run: Trajectory, project: Path) -> None:
    cli("apply", run.id, "-C", str(project))
    (project / "a.py").write_text("three\n")
    (project / "old.txt").write_text("mine\n")
    was = tree(project)
    refused(cli("undo", run.id, "-C", str(project)), "2 paths", "'a.py'", "'old.txt'", "nothing was touched")
    assert tree(project) == was
    refused(cli("undo", run.id, "--to", "1", "-C", str(project)), "1 path changed", "'old.txt'")
    assert tree(project) == was


# ------------------------------------------------------------------------------------ restore


def test_restore_writes_a_step_to_a_new_or_an_empty_directory(
    cli: Cli, run: Trajectory, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new/er", "empty"):
        done = cli("restore", run.id, "--at", "0", "--to", name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert tree(tmp_path / name) == logged(project)
    assert cli("restore", run.id, "--at", "4", "--to", "last").returncode == 0
    assert (tmp_path / "last" / os.fsdecode(b"n\xff")).read_bytes() == b"\0\xff"
    assert os.readlink(tmp_path / "last" / "link") == "a.py"


def test_restore_writes_over_nothing(cli: Cli, run: Trajectory, project: Path, tmp_path: Path) -> None:
    was = tree(project)
    (tmp_path / "dangling").symlink_to("nowhere")
    refused(cli("restore", run.id, "--at", "1", "--to", str(project)), str(project), "not empty", "--to")
    refused(cli("restore", run.id, "--at", "1", "--to", "project/a.py"), "not a directory", "--to")
    refused(cli("restore", run.id, "--at", "1", "--to", "dangling"), "dangling", "not a directory")
    assert tree(project) == was


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("step", ["5", "-1"])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    cli: Cli, run: Trajectory, project: Path, tmp_path: Path, step: str
) -> None:
    words = (run.id, f"no step {step}", "steps 1 to 4", "0 for the start")
    refused(cli("diff", run.id, "--at", step), *words)
    refused(cli("undo", run.id, "--to", step, "-C", str(project)), *words)
    refused(cli("restore", run.id, "--at", step, "--to", "copy"), *words)
    assert not (tmp_path / "copy").exists()


def test_bad_input_is_one_sentence(cli: Cli, home: Path, project: Path) -> None:
    here, there = ("-C", str(project)), ("--at", "1", "--to", "copy")
    refused(cli("undo", "abc", *here), f"there is no log at {home / 'log.db'}")
    refused(cli("restore", "abc", *there), "there is no log")
    LogStore.open(home / "log.db").close()
    refused(cli("undo", "abc", *here), "no run 'abc'")
    refused(cli("restore", "abc", *there), "no run 'abc'")
    refused(cli("undo", "abc", "-C", "nowhere"), "no such directory: nowhere", "-C")
    refused(cli("undo", "abc", "--to", "x", *here), "'--to'", "valid integer")
    refused(cli("restore", "abc", "--to", "copy"), "Missing option '--at'")
    refused(cli("restore", "abc", "--at", "1"), "Missing option '--to'")


# --------------------------------------------------------------------------------- what is left out


def test_what_the_user_excludes_is_in_no_snapshot(
    cli: Cli, project: Path, home: Path, tmp_path: Path
) -> None:
    (project / "data").mkdir()
    (project / "data/big.bin").write_bytes(b"x" * 1000)
    (project / "keys.secret").write_text("sk-1")
    (project / "nano.toml").write_text('exclude = ["data", "*.secret"]\n')
    config, sources = load_config({}, project)
    assert sources["exclude"] == "nano.toml"
    runtime = a_runtime(home, [act("submit", HERMES_1, answer="ok")], profile=HERMES_1)
    with runtime.store:
        run = run_task(a_task_of("Look.", project, config, runtime), runtime)
    assert cli("restore", run.id, "--at", "0", "--to", str(tmp_path / "copy")).returncode == 0
    kept = {path.name for path in (tmp_path / "copy").iterdir()}
    assert not kept & {"data", "keys.secret"}
    assert "a.py" in kept


def test_a_pattern_with_a_slash_is_refused(cli: Cli, project: Path) -> None:
    done = cli("run", "x", "-C", str(project), "--set", "exclude=data/big.bin")
    assert done.returncode == 2
    assert "'data/big.bin' is no pattern for a name" in done.stderr
