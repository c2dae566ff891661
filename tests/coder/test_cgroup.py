"""The control group around all jails of a launcher: where it is made, what it tells, that it goes away."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nano_coder.sandbox import namespaces
from nano_coder.sandbox.launcher import cgroup
from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.root_plan import find_cgroup, plan_cgroup
from nano_coder.sandbox.warm_pool import close_pools
from nano_shared.types import Limits

ROOT = Path(__file__).parents[2]
MB = 1 << 20
PLAN = plan_cgroup()
LIMITS = Limits(memory_mb=1024, tool_seconds=60)
needs_group = pytest.mark.skipif(PLAN is None, reason="no control group can be made by this user")


def groups_of(caller: int) -> set[str]:
    """Groups of the launchers that are children of a process; other tests have theirs beside them."""
    assert PLAN is not None
    return {
        os.path.join(parent, name)
        for parent in set(PLAN["parents"].values())
        for name in os.listdir(parent)
        if name.startswith(cgroup.PREFIX) and caller in _ancestors(Path(parent, name, "own/cgroup.procs"))
    }


def _ancestors(processes: Path) -> set[int]:
    found = set()
    with contextlib.suppress(OSError, IndexError):
        pid = int(processes.read_text().split()[0])
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.add(pid)
    return found


def gone(folders: set[str]) -> bool:
    for _ in range(6000):
        if not any(map(os.path.exists, folders)):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[NsSandbox]:
    """All jails together may take 300 MB; one jail more than that."""
    assert PLAN is not None
    close_pools()
    monkeypatch.setattr(namespaces, "plan_cgroup", lambda: {**PLAN, "memory": 300 * MB})
    yield NsSandbox()
    close_pools()


@needs_group
def test_a_kill_by_the_group_is_told_as_oom_and_later_ones_are_not(small: NsSandbox) -> None:
    assert small.layers["cgroup"]
    with closing(small.open(None, LIMITS)) as jail:
        made = groups_of(os.getpid())
        assert made
        result = jail.run_python("x = [b'x' * (1 << 20) for _ in range(600)]", timeout=50)
        assert (result.oom, result.signal, result.timed_out) == (True, 9, False)
        # the counter stays where it is: it was told once that every later kill was for memory
        for source in (
            "import os; os.kill(os.getpid(), 9)",
            "x = b'x' * (150 << 20); import os; os.kill(0, 9)",
        ):
            result = jail.run_python(source)
            assert (result.oom, result.signal) == (False, 9)
        assert jail.run_python("while True: pass", timeout=0.3).oom is False
        assert jail.run_python("print(1)").stdout == b"1\n"
    close_pools()
    assert gone(made)


@needs_group
def test_the_kill_of_one_jail_is_not_the_kill_of_another(small: NsSandbox) -> None:
    with closing(small.open(None, LIMITS)) as one, closing(small.open(None, LIMITS)) as other:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as thread:
            waits = thread.submit(
                other.run_python, "import os, sys; sys.stdin.read(); os.kill(os.getpid(), 9)", stdin=b""
            )
            hog = one.run_python("x = [b'x' * (1 << 20) for _ in range(600)]", timeout=50)
            other_result = waits.result()
    assert (hog.oom, other_result.oom, other_result.signal) == (True, False, 9)


@needs_group
def test_a_caller_that_is_killed_leaves_no_group() -> None:
    code = (
        "import sys, time; from nano_coder.sandbox.namespaces import NsSandbox;"
        "from nano_shared.types import Limits;"
        "jail = NsSandbox().open(None, Limits()); print('open', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}"}
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"open\n"
    made = groups_of(caller.pid)
    assert made
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert gone(made)


@needs_group
def test_what_a_killed_launcher_left_is_swept_and_what_lives_is_not() -> None:
    assert PLAN is not None
    parent = PLAN["parents"]["memory"]
    left, alive = (os.path.join(parent, f"{cgroup.PREFIX}{os.urandom(8).hex()}") for _ in range(2))
    for folder in (left, alive):
        os.makedirs(f"{folder}/own")
        os.mkdir(f"{folder}/1")
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        Path(alive, "own/cgroup.procs").write_text(str(sleeper.pid))
        cgroup.sweep([parent])
        there = [os.path.exists(folder) for folder in (left, alive, f"{alive}/1")]
        sleeper.kill()
    assert there == [False, True, True]
    while os.path.exists(alive):
        cgroup.sweep([parent])


@pytest.mark.slow
@needs_group
def test_launchers_of_several_pid_namespaces_share_one_mount_of_control_groups() -> None:
    """As in two containers: each has the process numbers of the other, and must not take its groups."""
    code = (
        "from nano_coder.sandbox.namespaces import NsSandbox; from nano_shared.types import Limits\n"
        "for _ in range(3):\n"
        "    s = NsSandbox(); jail = s.open(None, Limits())\n"
        "    print(s.layers['cgroup'], jail.run_python('print(1)').stdout.decode().strip(), flush=True)\n"
        "    jail.close(); s.pool.close()\n"
        "    from nano_coder.sandbox.warm_pool import close_pools; close_pools()\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}"}
    apart = ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", code]
    callers = [
        subprocess.Popen(apart, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [caller.communicate(timeout=100) for caller in callers] == [("True 1\n" * 3, "")] * 2


@needs_group
def test_a_group_that_vanishes_before_it_is_entered_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLAN is not None
    plan = {**PLAN, "name": f"{cgroup.PREFIX}{os.urandom(8).hex()}"}
    made, write, entered = cgroup.ControlGroup(plan), cgroup._write, []

    def swept(path: str, text: str) -> None:
        if path.endswith("own/cgroup.procs"):
            # never this process: what is tried is what becomes of a group that another launcher sweeps
            if not entered:
                cgroup.sweep(plan["parents"].values())
            entered.append(os.path.exists(path))
        else:
            write(path, text)
        if entered == [False]:
            open(path).close()

    monkeypatch.setattr(cgroup, "_write", swept)
    made.enter()
    made.remove()
    assert entered[0] is False
    assert all(entered[1:])
    assert len(entered) > 1


@needs_group
def test_the_programs_of_a_jail_have_a_group_and_init_is_not_in_it() -> None:
    with closing(NsSandbox().open(None, Limits())) as one, closing(NsSandbox().open(None, Limits())) as other:
        look = "print([l for l in open('/proc/self/cgroup') if ':memory:' in l])"
        of_init = "print([l for l in open('/proc/1/cgroup') if ':memory:' in l])"
        groups = {jail.run_python(look).stdout for jail in (one, other)}
        assert len(groups) == 2
        assert groups.isdisjoint(jail.run_python(of_init).stdout for jail in (one, other))


def test_kills_are_read_from_either_version(tmp_path: Path) -> None:
    for text in (
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        "low 0\noom 9\noom_kill 3\noom_group_kill 1\n",
    ):
        (tmp_path / "events").write_text(text)
        fd = os.open(tmp_path / "events", os.O_RDONLY)
        assert cgroup.kills(fd) == cgroup.kills(fd) == 3
        os.close(fd)
    assert cgroup.kills(-1) == 0


def hierarchy(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_delegated_group_of_version_2_is_found_above_ours(tmp_path: Path) -> None:
    process = hierarchy(tmp_path / "proc", {"cgroup": "0::/user/app/run.scope\n"})
    mounts = hierarchy(
        tmp_path / "sys",
        {
            "cgroup.controllers": "memory pids",
            "user/cgroup.subtree_control": "memory pids",
            "user/app/cgroup.subtree_control": "cpu memory pids",
            "user/app/cgroup.procs": "",
            "user/app/memory.max": "1000",
            "user/memory.max": "800",
            "user/app/run.scope/cgroup.subtree_control": "",
        },
    )
    assert find_cgroup(process, mounts) == {
        "version": "v2",
        "parents": dict.fromkeys(("memory", "pids"), str(mounts / "user/app")),
        "memory": 600,
        "pids": 20_000,
    }


def test_without_controllers_there_is_no_group(tmp_path: Path) -> None:
    process = hierarchy(tmp_path / "proc", {"cgroup": "8:pids:/a\n0::/a\n"})
    mounts = hierarchy(tmp_path / "sys", {"pids/a/cgroup.procs": "", "unified/a/cgroup.procs": ""})
    assert find_cgroup(process, mounts) is None
    assert find_cgroup(tmp_path / "none", mounts) is None


def test_a_group_of_each_controller_is_found_in_version_1(tmp_path: Path) -> None:
    process = hierarchy(tmp_path / "proc", {"cgroup": "8:pids:/\n4:cpu,memory:/box/1\n0::/\n"})
    limit = {
        "memory/box/1/cgroup.procs": "",
        "memory/box/1/memory.limit_in_bytes": "4000",
        "pids/cgroup.procs": "",
    }
    mounts = hierarchy(tmp_path / "sys", limit)
    found = find_cgroup(process, mounts)
    assert found is not None
    assert (found["version"], found["memory"]) == ("v1", 3000)
    assert found["parents"] == {"memory": str(mounts / "memory/box/1"), "pids": str(mounts / "pids")}


@pytest.mark.parametrize("parent", ["/nowhere", "/proc"])
def test_a_jail_whose_group_cannot_be_made_goes_without_and_says_so(
    monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    plan = {
        "version": "v1", "parents": dict.fromkeys(("memory", "pids"), parent), "memory": MB, "pids": 9,
    }  # fmt: skip
    monkeypatch.setattr(namespaces, "plan_cgroup", lambda: plan)
    sandbox = NsSandbox()
    with closing(sandbox.open(None, Limits())) as jail:
        assert jail.run_python("print(1)").stdout == b"1\n"
    assert sandbox.layers["cgroup"] is False
    sandbox.pool.close()
