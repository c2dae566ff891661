"""Every execution is logged as it happens, and one that was killed goes on from its last finished turn."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits

from nano_coder.agent.actions import Workspace
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunHooks, grade_run, resume_run, run_task
from nano_coder.sandbox.namespaces import NsSandbox
from nano_shared.errors import LogError, SandboxError, UsageError
from nano_shared.snapshot import snapshot_directory
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Turn

TEXTS = [*(act("shell", command=f"echo {n} >> log; cat log") for n in range(4)), SUBMIT]

# A run in a process of its own, slow enough to be killed anywhere.
RUN = """
import sys, time
from dataclasses import replace
from pathlib import Path
from executions import a_runtime, a_task
from nano_coder.run.execution import RunHooks, run_task
from test_runtime import TEXTS
folder, start = Path(sys.argv[1]), sys.argv[2]
hooks = RunHooks(start=lambda t: print("started", flush=True), turn=lambda t: time.sleep(0.1))
run_task(a_task(files={}, snapshot=start), replace(a_runtime(folder, TEXTS), hooks=hooks), seed=1)
"""


def killed_run(folder: Path, start: str, wait: float) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), start], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"started\n"
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)


def check_kills(tmp_path: Path, times: int) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.py").write_text("one\n")
    runtime = a_runtime(tmp_path, TEXTS)
    start = snapshot_directory(project, runtime.store.blobs)
    whole = run_task(a_task(files={}, snapshot=start), runtime, seed=1)
    chance = random.Random(0)
    for _ in range(times):
        killed_run(tmp_path, start, chance.uniform(0, 1.5))
        logged = runtime.store.get("last")
        done = len(logged.turns)
        policy = ScriptedPolicy(TEXTS[done:], tokens=True)
        if logged.stop is not None:
            assert logged.diff == whole.diff
            continue
        resumed = resume_run(logged.id, replace(runtime, policy=policy))
        assert resumed.turns[:done] == logged.turns
        assert (resumed.stop, resumed.diff) == (StopReason.FINISHED, whole.diff)
        assert [t.completion for t in resumed.turns] == [t.completion for t in whole.turns]
        assert runtime.store.get(logged.id) == resumed
    assert [p.name for p in project.iterdir()] == ["a.py"]
    assert (project / "a.py").read_text() == "one\n"


@pytest.mark.timeout(600)
def test_a_killed_run_keeps_its_turns_and_ends_as_it_would_have(tmp_path: Path) -> None:
    check_kills(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    check_kills(tmp_path, 20)


def test_each_turn_is_in_the_log_before_the_next_begins(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, TEXTS)
    logged: list[list[Turn]] = []
    seen: list[Turn] = []

    def on_turn(turn: Turn) -> None:
        seen.append(turn)
        with LogStore.open(tmp_path / "log.db") as other:
            logged.append(list(other.get("last").turns))

    trajectory = run_task(a_task(), replace(runtime, hooks=RunHooks(turn=on_turn)))
    assert logged == [list(trajectory.turns[: n + 1]) for n in range(len(TEXTS))]
    assert seen == list(trajectory.turns)


def test_an_interrupted_run_says_so_and_resumes(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, TEXTS)

    def interrupt(turn: Turn) -> None:
        if turn.index == 1:
            raise KeyboardInterrupt

    cut = run_task(a_task(), replace(runtime, hooks=RunHooks(turn=interrupt)))
    assert (cut.stop, len(cut.turns)) == (StopReason.INTERRUPTED, 2)
    assert "+1" in cut.diff
    whole = resume_run(cut.id, runtime)
    assert (whole.stop, len(whole.turns)) == (StopReason.FINISHED, 5)
    assert whole.turns[:2] == cut.turns
    assert runtime.store.get(cut.id) == whole


def test_a_run_that_was_killed_after_its_last_turn_ends_without_another(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [TEXTS[0], act("submit", answer="42")])

    class Killed(BaseException):
        pass

    def kill(turn: Turn) -> None:
        if turn.index == 1:
            raise Killed

    with pytest.raises(Killed):
        run_task(a_task(), replace(runtime, hooks=RunHooks(turn=kill)))
    resumed = resume_run("last", replace(runtime, policy=ScriptedPolicy([], tokens=True)))
    assert (resumed.stop, resumed.answer, len(resumed.turns)) == (StopReason.FINISHED, "42", 2)


def test_a_resumed_agent_still_reads_its_long_outputs(tmp_path: Path) -> None:
    texts = [act("shell", command="seq 999"), act("shell", command="head -n 1 .nano/output_0.txt"), SUBMIT]
    runtime = a_runtime(tmp_path, texts)

    def interrupt(turn: Turn) -> None:
        if turn.index == 0:
            raise KeyboardInterrupt

    cut = run_task(a_task(), replace(runtime, hooks=RunHooks(turn=interrupt)))
    assert resume_run(cut.id, runtime).turns[1].observations[0].text == "1"


def test_a_run_that_ended_is_not_resumed(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [SUBMIT])
    trajectory = run_task(a_task(), runtime)
    with pytest.raises(UsageError, match=rf"run {trajectory.id} ended \(finished\)"):
        resume_run(trajectory.id, runtime)
    with pytest.raises(LogError, match="no run 'nothing'"):
        resume_run("nothing", runtime)


@pytest.mark.slow
def test_one_process_at_a_time_resumes_a_run(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [])
    start = snapshot_directory(tmp_path_with_a_file(tmp_path), runtime.store.blobs)
    killed_run(tmp_path, start, 0.0)
    run = runtime.store.resolve("last")
    holder = (
        "import sys; from nano_shared.store import LogStore\n"
        "with LogStore.open(sys.argv[1]).claim(sys.argv[2]): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "log.db"), run],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:  # fmt: skip
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LogError, match=f"executed by another process .pid {other.pid}."):
            resume_run(run, runtime)
        other.communicate(b"")


def tmp_path_with_a_file(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.py").write_text("one\n")
    return project


def test_another_policy_may_not_go_on_with_a_run(tmp_path: Path) -> None:
    class Other(ScriptedPolicy):
        template_hash = "sha256:other"

    runtime = a_runtime(tmp_path, TEXTS)

    def interrupt(turn: Turn) -> None:
        raise KeyboardInterrupt

    cut = run_task(a_task(), replace(runtime, hooks=RunHooks(turn=interrupt)))
    with pytest.raises(UsageError, match="another template than this policy's"):
        resume_run(cut.id, replace(runtime, policy=Other([])))


def test_a_sandbox_that_cannot_open_ends_the_run(tmp_path: Path) -> None:
    class Broken(NsSandbox):
        def open(self, workspace: Path | None, limits: object) -> object:  # type: ignore[override]
            raise SandboxError("no namespaces here")

    runtime = a_runtime(tmp_path, [act("read_file", path="a"), SUBMIT], sandbox=Broken())
    trajectory = run_task(a_task(), runtime)
    assert (trajectory.stop, trajectory.stop_detail) == (StopReason.SANDBOX_ERROR, "no namespaces here")
    assert runtime.store.get(trajectory.id) == trajectory


def test_a_task_that_cannot_be_served_is_refused_before_it_is_logged(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [])
    with pytest.raises(UsageError, match="allows 'fly', which profile compact-1 does not have"):
        run_task(a_task(tools=("fly",)), runtime)
    for files in ({"a": "", "a/b": ""}, {"a": "\ud800"}, {"n" * 300: ""}):
        with pytest.raises(UsageError, match=r"task 't': its files cannot be written: .*'"):
            run_task(a_task(files=files), runtime)
    assert runtime.store.runs() == []


def test_a_check_is_run_on_the_original_tests_and_logged(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [act("shell", command="echo 2 > a.py; echo true > test_it.py"), SUBMIT])
    task = a_task(files={"a.py": "1\n", "test_it.py": "grep -q 2 a.py"}, check="sh test_it.py")
    trajectory = grade_run(run_task(task, runtime), runtime)
    assert trajectory.reward == 1
    assert trajectory.verdict
    assert [t.detail for t in trajectory.verdict.tampering] == [
        "test_it.py was changed; the original was used"
    ]
    assert runtime.store.get(trajectory.id) == trajectory


def test_without_a_check_there_is_no_verdict(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [SUBMIT])
    assert grade_run(run_task(a_task(limits=limits()), runtime), runtime).verdict is None


def test_a_workspace_names_what_changed(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [])
    empty = tmp_path / "empty"
    empty.mkdir()
    start = snapshot_directory(empty, runtime.store.blobs)
    jail = runtime.sandbox.open(None, limits())
    workspace = Workspace(jail, runtime.store.blobs, start=start, snapshot=start)
    assert (workspace.refresh(), workspace.diff(), workspace.files()) == ((), "", [])
    jail.write("a/b", b"x\n")
    assert workspace.refresh() == ("a/b",)
    assert workspace.snapshot != workspace.start
    jail.close()
