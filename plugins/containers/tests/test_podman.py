"""The sandbox podman: images, what it refuses, and tasks that name one; with podman and a static busybox.

The promises that it shares with the other backends are in test_bwrap.py.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits

from nano_coder.run.execution import grade_run, run_task
from nano_coder.sandbox.protocol import Sandbox, in_image, open_sandbox
from nano_containers import podman
from nano_containers.podman import PodmanSandbox, find_podman
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits, Task

IMAGE = "localhost/nano-test-busybox"
BUSYBOX = Path("/bin/busybox")


def why_not() -> str | None:
    """Why no container can be run here."""
    try:
        find_podman()
    except SandboxError as problem:
        return str(problem)
    # a dynamic program names its loader in its first page
    static = BUSYBOX.exists() and b"/ld-" not in BUSYBOX.read_bytes()[:4096]
    return None if static else f"{BUSYBOX} is not static (apt-get install busybox-static)"


REASON = why_not()
needs_podman = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def busybox() -> str:
    """An image of nothing but busybox: no C library, no Python."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(BUSYBOX, "bin/busybox")
        for name in ("sh", "cat", "ls", "id", "sleep"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    # named after what it holds: an import each time would leave the last one behind without a name
    image = f"{IMAGE}:{hashlib.sha256(packed.getvalue()).hexdigest()[:12]}"
    if subprocess.run(["podman", "image", "exists", image], check=False).returncode:
        argv = ["podman", "import", "--quiet", "--change", "ENV GREETING=hello", "-", image]
        subprocess.run(argv, input=packed.getvalue(), check=True, capture_output=True)
    return image


@pytest.fixture(scope="module")
def sandbox(busybox: str) -> Sandbox:
    return open_sandbox("podman", image=busybox)


@needs_podman
def test_an_image_without_python_or_a_c_library_runs(sandbox: Sandbox) -> None:
    with closing(sandbox.open(None, Limits())) as jail:
        said = jail.run(["sh", "-c", "echo $GREETING > file; cat file; exit 3"])
        assert (said.stdout, said.exit_code) == (b"hello\n", 3)
        # our tools' source runs on nano's own interpreter
        ours = jail.run_python("import os; print(open('file').read(), os.getcwd())", isolated=True)
        assert ours.stdout == b"hello\n /work\n"
        assert jail.read("file") == b"hello\n"


@needs_podman
def test_every_layer_but_the_hosts_is_on(sandbox: Sandbox) -> None:
    off = {name for name, on in sandbox.layers.items() if not on}
    assert off <= {"seccomp", "landlock", "cgroup", "workspace_size"}
    assert os.geteuid() or sandbox.layers["cgroup"]


@needs_podman
def test_another_folder_of_the_host_is_shown_where_it_is_asked_for(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "shown").write_text("theirs")
    assert isinstance(sandbox, PodmanSandbox)
    with closing(sandbox.with_mount(tmp_path, "/opt/more").open(None, Limits())) as jail:
        said = jail.run(["sh", "-c", "cat /opt/more/shown; echo x > /opt/more/new || echo refused"])
    assert said.stdout == b"theirsrefused\n"
    assert not (tmp_path / "new").exists()


@needs_podman
def test_an_image_that_is_not_here_is_named_and_not_pulled() -> None:
    with pytest.raises(SandboxError, match=r"no image 'localhost/nosuch' here.*podman pull localhost/nosuch"):
        open_sandbox("podman", image="localhost/nosuch")


@needs_podman
def test_a_sandbox_without_an_image_says_how_to_name_one() -> None:
    with pytest.raises(UsageError, match="--container-image"):
        open_sandbox("podman").open(None, Limits())


@needs_podman
def test_a_task_that_names_an_image_runs_and_is_graded_in_it(busybox: str, tmp_path: Path) -> None:
    edit = act("shell", command="echo $GREETING > a.py; ls /bin | head -n 1")
    runtime = a_runtime(tmp_path, [edit, SUBMIT], sandbox=open_sandbox("podman"))
    task = a_task(image=busybox, check='grep -q hello a.py && test "$GREETING" = hello', limits=limits())
    run = grade_run(run_task(task, runtime), runtime)
    assert run.stop == "finished"
    assert "busybox" in run.turns[0].observations[0].text
    assert run.verdict
    assert run.verdict.reward == 1
    assert runtime.store.get(run.id).task.image == busybox


@pytest.mark.slow
@needs_podman
def test_a_run_whose_image_is_missing_ends_with_the_code_of_the_sandbox(tmp_path: Path) -> None:
    argv = [
        "run",
        "do it",
        "-C",
        str(tmp_path),
        "--sandbox",
        "podman",
        "--container-image",
        "localhost/nosuch",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "from nano_coder.cli import main; main()", *argv],
        env={**os.environ, "NANO_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 6
    assert "error: podman has no image 'localhost/nosuch' here" in done.stderr.splitlines()[-1]


def test_a_sandbox_that_runs_no_image_refuses_the_task_of_one() -> None:
    with pytest.raises(UsageError, match="'ns' runs no image, and 'debian' is named; use --sandbox podman"):
        in_image(open_sandbox("ns"), "debian")


def test_a_task_without_an_image_is_what_it_was() -> None:
    task = Task(key="t", prompt="do it")
    assert "image" not in task.model_dump(mode="json")
    assert task.model_copy(update={"image": "debian"}).id != task.id
    assert Task.model_validate(task.model_dump(mode="json")).id == task.id


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    monkeypatch.setattr(podman, "SEARCHED", str(tmp_path))
    return tmp_path


def put(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_what_is_missing_is_named_with_its_package(programs: Path) -> None:
    with pytest.raises(SandboxError, match=r"needs podman; install it: sudo apt-get install podman runc"):
        open_sandbox("podman")
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        put(programs, "podman")
        with pytest.raises(SandboxError, match=r"needs runc.*apt-get install podman runc"):
            open_sandbox("podman")


def test_an_ordinary_user_needs_subordinate_ids(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("podman", "runc"):
        put(programs, name)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr("getpass.getuser", lambda: "nobody-here")
    with pytest.raises(SandboxError, match="newuidmap"):
        find_podman()
    put(programs, "newuidmap")
    with pytest.raises(SandboxError, match=r"subordinate ids for 'nobody-here'.*usermod --add-subuids"):
        find_podman()
