"""Three backends, one set of promises; and what is bubblewrap's own. Run where `bwrap` is installed.

podman takes part where TEST_CONTAINER_IMAGE names an image of Debian with Python, as `make test-all` does.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from executions import stopped_after_output

from nano_coder.sandbox.launcher import seccomp
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox, open_sandbox
from nano_containers import bubblewrap
from nano_containers.bubblewrap import BwrapJail, BwrapSandbox
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

SECRET = "sk-not-a-real-key-51c8e2"
MACHINE = platform.machine()

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap", path=bubblewrap.SEARCHED) is None,
    reason="bubblewrap is not installed (apt-get install bubblewrap)",
)
needs_filter = pytest.mark.skipif(MACHINE not in seccomp.MACHINES, reason=f"no seccomp table for {MACHINE}")


IMAGE = os.environ.get("TEST_CONTAINER_IMAGE")
podman_too = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not IMAGE, reason="TEST_CONTAINER_IMAGE names no image; integration/container_image.py makes one"
    ),
]


@pytest.fixture(
    scope="module",
    params=["ns", pytest.param("bwrap", marks=needs_bwrap), pytest.param("podman", marks=podman_too)],
)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return open_sandbox(request.param, image=IMAGE if request.param == "podman" else None)


@pytest.fixture
def jail(sandbox: Sandbox) -> Iterator[Jail]:
    with closing(sandbox.open(None, Limits(memory_mb=256, tool_seconds=60))) as jail:
        yield jail


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.py").write_text("print('hello')\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("src/main.py")
    return tmp_path


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that everybody can enter, and nobody else uses."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


def python(jail: Jail, code: str, **options: object) -> ExecResult:
    return jail.run(["python", "-c", textwrap.dedent(code)], **options)  # type: ignore[arg-type]


def shell(jail: Jail, line: str, **options: object) -> ExecResult:
    return jail.run(["sh", "-c", line], **options)  # type: ignore[arg-type]


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if holds():
            return True
        time.sleep(0.02)
    return False


def running(marker: str) -> list[int]:
    """Processes of this machine with `marker` among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


# ------------------------------------------------------------------------------------ normal use


def test_output_and_exit_code_come_back(jail: Jail) -> None:
    result = shell(jail, "echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == (b"out\n", b"err\n", 3, None)


def test_a_signal_is_no_exit_code(jail: Jail) -> None:
    killed, returned = python(jail, "import os; os.kill(os.getpid(), 9)"), shell(jail, "exit 137")
    assert (killed.exit_code, killed.signal) == (None, 9)
    assert (returned.exit_code, returned.signal) == (137, None)


def test_what_cannot_start_is_a_result(jail: Jail) -> None:
    jail.write("plain.txt", b"text")
    assert jail.run(["no-such-program"]).exit_code == 127
    assert jail.run(["./plain.txt"]).exit_code == 126


def test_input_arguments_and_environment_go_in(jail: Jail) -> None:
    data = bytes(range(256)) * 4096
    assert jail.run(["cat"], stdin=data, output_bytes=len(data)).stdout == data
    said = python(
        jail, "import os, sys; print(os.environ['WORD'], repr(sys.stdin.read()))", env={"WORD": "日本"}
    )
    assert said.stdout.decode() == "日本 ''\n"


def test_the_environment_is_fixed(jail: Jail, sandbox: Sandbox) -> None:
    argv = [sandbox.python, "-c", "import os; print(*os.environ)"]
    assert set(jail.run(argv, env={"EXTRA": "1"}).stdout.decode().split()) == {
        "PATH", "HOME", "TMPDIR", "USER", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "LSAN_OPTIONS",
        "EXTRA",
    }  # fmt: skip


def test_pytest_runs_inside(jail: Jail) -> None:
    jail.write("test_it.py", b"def test_it():\n    assert 1 + 1 == 2\n")
    result = jail.run(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"])
    assert b"1 passed" in result.stdout, result


def test_processes_threads_and_loopback_work(jail: Jail) -> None:
    code = """
        import multiprocessing, socket, threading
        thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
        with multiprocessing.Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        server.accept()[0].sendall(b"over loopback")
        print(client.recv(64))
    """
    assert python(jail, code).stdout == b"thread\n[1, 2]\nb'over loopback'\n"


def test_files_stay_between_runs_and_nothing_else(jail: Jail) -> None:
    shell(jail, "echo kept > file; echo x > /tmp/file; echo x > /dev/shm/file; setsid sleep 1000 &")
    seen = shell(jail, "cat file; ls -A /tmp /dev/shm; pgrep sleep || echo no process")
    assert seen.stdout == b"kept\n/dev/shm:\n\n/tmp:\nno process\n"


def test_the_program_owns_what_the_host_writes(jail: Jail) -> None:
    jail.write("a/b", b"ours")
    assert shell(jail, "echo theirs >> a/b && mv a c && rm c/b && rmdir c").ok


def test_the_host_reads_what_the_program_writes(jail: Jail) -> None:
    shell(jail, "umask 077; mkdir -p deep; echo secret > deep/file; chmod 000 deep/file; ln -s /etc out")
    with pytest.raises(PermissionError):
        jail.read("deep/file")
    with pytest.raises(PermissionError):
        jail.read("out/passwd")
    shell(jail, "chmod 600 deep/file")
    assert jail.read("deep/file") == b"secret\n"


def test_a_snapshot_can_be_restored(sandbox: Sandbox, jail: Jail, project: Path) -> None:
    with closing(sandbox.open(project, Limits())) as other:
        tar = other.snapshot()
    shell(jail, "mkdir -p left/over; echo x > left/over/file; chmod 000 left")
    jail.restore(tar)
    assert jail.snapshot() == tar
    assert shell(jail, "readlink link; ./run.sh; ls -ld /work | cut -c1-10").stdout == (
        b"src/main.py\nran\ndrwxr-xr-x\n"
    )


# ---------------------------------------------------------------------------------------- limits


def test_a_time_out_keeps_what_was_written_and_kills_everything(jail: Jail) -> None:
    mine = str(50_000 + os.getpid() % 9_000)  # not that of another worker, which tests the other sandbox
    line = f"echo partial; setsid sleep {mine} & sleep {mine}"
    result = stopped_after_output(lambda seconds: shell(jail, line, timeout=seconds))
    assert (result.timed_out, result.exit_code, result.signal) == (True, None, 9)
    assert result.stdout == b"partial\n"
    assert running(mine) == []


def test_a_run_ends_when_its_program_ends(jail: Jail) -> None:
    result = shell(jail, "echo done; sleep 1000 &", timeout=50)
    assert (result.stdout, result.timed_out) == (b"done\n", False)


def test_a_flood_of_output_is_cut_and_killed(jail: Jail) -> None:
    result = jail.run(["yes"], output_bytes=4096)
    assert (result.signal, result.timed_out, len(result.stdout)) == (9, False, 4096)


def test_a_fork_bomb_is_bounded(jail: Jail) -> None:
    code = """
        import os, time
        count = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
                count += 1
        except OSError:
            print(count)
    """
    assert 32 <= int(python(jail, code).stdout) < 64
    assert shell(jail, "echo alive").stdout == b"alive\n"


def test_memory_is_bounded_for_one_process_and_for_all(jail: Jail) -> None:
    assert python(jail, "import time; x = b'x' * (512 << 20); time.sleep(60)").oom
    code = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                held = b"x" * (100 << 20)
                time.sleep(1000)
        time.sleep(1000)
    """
    result = python(jail, code)
    assert (result.oom, result.timed_out, result.signal) == (True, False, 9)


def test_a_program_gets_terminals_of_its_own(jail: Jail) -> None:
    """As `script`, tmux and pexpect open them; nothing can be typed into one."""
    code = """
        import errno, fcntl, os, pty
        print(os.listdir("/dev/pts"))
        pid, ours = pty.fork()
        if pid == 0:
            with open("/dev/tty", "w") as terminal:
                terminal.write(os.ttyname(0))
            os._exit(0)
        print(os.read(ours, 100).decode())
        for request in (0x5412, 0x541C, 0x5423):
            try:
                fcntl.ioctl(ours, request, b"x   ")
            except OSError as error:
                print(errno.errorcode[error.errno])
    """
    assert python(jail, code).stdout.split() == [b"['ptmx']", b"/dev/pts/0", b"EPERM", b"EPERM", b"EPERM"]


def test_files_and_temporary_space_have_a_size(jail: Jail) -> None:
    assert shell(jail, "head -c 1500M /dev/zero > file").exit_code != 0  # memory, or a file on a disk
    filled = shell(jail, "for i in 1 2 3; do head -c 200M /dev/zero > /tmp/$i || exit 1; done")
    assert filled.exit_code == 1 or filled.oom  # what lies in /tmp is memory: the watch may be there first
    assert shell(jail, "head -c 100M /dev/zero > /dev/shm/x").exit_code != 0


def test_what_was_used_is_counted(jail: Jail) -> None:
    result = python(jail, "held = b'x' * (64 << 20); sum(range(2_000_000))")
    assert result.used.cpu_s > 0
    assert 64 << 20 < result.used.peak_bytes < 256 << 20


# ------------------------------------------------------------------------------------- isolation


def test_files_of_the_host_are_invisible(sandbox: Sandbox, jail: Jail, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text(SECRET)
    paths = [str(tmp_path / "canary"), __file__]
    if sandbox.name != "podman":  # an image has its own
        paths += ["/etc/shadow", "/var", "/sys/kernel", "/run", "/boot"]
    assert python(jail, f"import os; print([p for p in {paths!r} if os.path.exists(p)])").stdout == b"[]\n"


def test_nothing_but_the_workspace_can_be_written(jail: Jail) -> None:
    line = (
        "for place in / /usr /etc /dev /opt /proc/sys /opt/nano/launcher; do touch $place/x; done; echo end"
    )
    result = shell(jail, line)
    assert result.stdout == b"end\n"
    assert len(result.stderr.splitlines()) == 7
    assert not shell(jail, "echo 1 > /proc/sys/vm/swappiness").ok


def test_secrets_of_the_caller_are_in_no_environment_inside(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    code = """
        import glob
        for kind in ("environ", "cmdline", "maps"):
            for path in glob.glob(f"/proc/[0-9]*/{kind}"):
                try: print(open(path, "rb").read())
                except OSError: pass
    """
    with closing(sandbox.open(None, Limits())) as jail:
        said = python(jail, code).stdout
    assert b"python" in said
    assert SECRET.encode() not in said


def test_processes_of_the_host_are_invisible(jail: Jail) -> None:
    listed = python(jail, "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))").stdout
    assert int(listed) < 4


def test_there_is_no_network(jail: Jail) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import socket
            for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
                try: print(socket.create_connection(address, timeout=5))
                except OSError as error: print(type(error).__name__)
        """
        assert python(jail, code).stdout == b"ConnectionRefusedError\nOSError\n"


@pytest.mark.some(4)
@needs_filter
@pytest.mark.parametrize("name", ["unshare", "ptrace", "setns", "mount", "bpf", "memfd_create", "shmget"])
def test_dangerous_system_calls_are_refused(jail: Jail, name: str) -> None:
    call = f"libc.syscall({seccomp.denied(MACHINE)[name]}, 0, 0, 0, 0, 0, 0)"
    code = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print({call}, ctypes.get_errno())"
    assert jail.run(["python", "-I", "-S", "-c", code]).stdout == b"-1 1\n"


@needs_filter
def test_the_hypervisor_cannot_be_reached(jail: Jail) -> None:
    result = python(jail, "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)")
    assert b"Address family not supported" in result.stderr


def test_a_program_has_no_privileges(sandbox: Sandbox, jail: Jail) -> None:
    said = shell(jail, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status; id -u; id -G").stdout.decode().split()
    assert set(said[1:10:2]) == {"0" * 16}
    uid = "0" if sandbox.name == "podman" else "1000"  # of its user namespace
    assert said[10:] == ["NoNewPrivs:", "1", uid, uid]


def test_a_program_runs_as_nobody_of_the_host(jail: Jail) -> None:
    owners: list[int] = []

    def look() -> bool:
        owners.extend(Path(f"/proc/{pid}").stat().st_uid for pid in running("51830"))
        return bool(owners)

    def work() -> None:
        with contextlib.suppress(SandboxError):
            shell(jail, "sleep 51830", timeout=250)

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(look)
    jail.close()
    thread.join()
    assert 0 not in owners


@pytest.mark.slow
def test_what_ends_a_run_cannot_be_ended_from_inside(jail: Jail) -> None:
    # whatever becomes of the processes beside it, a program that was killed did not succeed
    result = shell(jail, "kill -9 1 2; kill -9 -1; sleep 1000", timeout=3)
    assert (result.exit_code, result.timed_out) == (None, False) or result.exit_code != 0
    assert shell(jail, "echo alive").stdout == b"alive\n"


def test_the_original_workspace_is_untouched(sandbox: Sandbox, project: Path) -> None:
    before = {path: path.lstat() for path in sorted(project.rglob("*"))}
    with closing(sandbox.open(project, Limits())) as jail:
        shell(jail, "rm -rf * ; echo new > file; mkdir folder")
    after = {path: path.lstat() for path in sorted(project.rglob("*"))}
    assert [(p, s.st_mtime_ns, s.st_size, s.st_mode) for p, s in before.items()] == [
        (p, s.st_mtime_ns, s.st_size, s.st_mode) for p, s in after.items()
    ]


# -------------------------------------------------------------------------------- life and death


def test_closing_leaves_no_file_process_or_descriptor(sandbox: Sandbox, temporary: Path) -> None:
    def held() -> tuple[int, str]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/mountinfo").read_text()

    sandbox.open(None, Limits()).close()
    jail = sandbox.open(None, Limits())
    before = held()
    shell(jail, "setsid sleep 51831 & mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a; ln -s / root")
    if sandbox.name != "ns":
        assert held() == before
    jail.close()
    jail.close()
    assert list(temporary.iterdir()) == []
    assert eventually(lambda: running("51831") == [])
    with pytest.raises(SandboxError, match="closed"):
        jail.run(["true"])


def test_closing_ends_a_run_in_another_thread(sandbox: Sandbox) -> None:
    jail = sandbox.open(None, Limits())
    failures: list[SandboxError] = []

    def work() -> None:
        try:
            jail.run(["sleep", "51832"], timeout=100)
        except SandboxError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: running("51832") != [])
    jail.close()
    thread.join()
    assert len(failures) == 1


@pytest.mark.some(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_death_of_the_agent_ends_its_programs(sandbox: Sandbox, number: signal.Signals) -> None:
    marker = f"5184{number.value}{len(sandbox.name)}"
    image = IMAGE if sandbox.name == "podman" else None
    code = f"""
        from nano_coder.sandbox.protocol import open_sandbox
        from nano_shared.types import Limits
        jail = open_sandbox({sandbox.name!r}, image={image!r}).open(None, Limits())
        jail.run(["sh", "-c", "setsid sleep {marker} & sleep {marker}"], timeout=500)
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        # killed outright, an agent leaves the private copy behind
        environment = {**os.environ, "TMPDIR": folder}
        agent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment)
        assert eventually(lambda: len(running(marker)) == 2)
        agent.send_signal(number)
        agent.wait()
        assert eventually(lambda: running(marker) == [])


# ------------------------------------------------------------------------------ bubblewrap's own


@needs_bwrap
def test_every_layer_but_the_hosts_is_on() -> None:
    off = {name for name, on in open_sandbox("bwrap").layers.items() if not on}
    assert off <= {"seccomp", "landlock", "cgroup", "workspace_size"}


@needs_bwrap
def test_the_self_test_notices_what_an_open_jail_would_allow() -> None:
    with closing(BwrapSandbox().open(None, Limits())) as jail:
        assert isinstance(jail, BwrapJail)
        held = jail.probe(Path("/etc/passwd"))
    assert held.pop("mount_namespace") is False  # this one file can be read
    assert set(held.values()) == {True}


@needs_bwrap
def test_a_program_that_stops_its_watcher_is_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_coder.sandbox.jail_request.Drain.PATIENCE_S", 0.5)
    with closing(open_sandbox("bwrap").open(None, Limits())) as jail:
        result = shell(jail, "kill -STOP 2; sleep 51833", timeout=0.5)
    assert (result.timed_out, result.signal) == (True, 9)
    assert running("51833") == []


@needs_bwrap
def test_a_hostile_snapshot_changes_nothing_outside(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        link = tarfile.TarInfo("door")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("door/evil"))
    with closing(open_sandbox("bwrap").open(None, Limits())) as jail, pytest.raises(UsageError):
        jail.restore(stream.getvalue())
    assert list(tmp_path.iterdir()) == []


@needs_bwrap
@pytest.mark.as_root
def test_root_names_a_folder_that_programs_cannot_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SandboxError, match="TMPDIR"):
        BwrapSandbox().open(None, Limits())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_bubblewrap_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "SEARCHED", "/nowhere")
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        open_sandbox("bwrap")


def test_a_bubblewrap_that_bounds_no_tmpfs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(bubblewrap, "SEARCHED", str(tmp_path))
    with pytest.raises(SandboxError, match=r"0\.6\.1.*needs 0\.7"):
        open_sandbox("bwrap")


# a kernel from before mount_setattr, which we need and bubblewrap does not
OLD_KERNEL = """
    import errno, os, struct, sys
    from nano_coder.sandbox.protocol import open_sandbox
    from nano_containers import bubblewrap
    from nano_coder.sandbox.launcher import kernel
    from nano_shared.types import Limits
    step = lambda code, value, yes=0, no=0: struct.pack("=HBBI", code, yes, no, value)
    refuse = step(0x06, 0x50000 | errno.ENOSYS)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.install_filter(step(0x20, 0) + step(0x15, 442, 0, 1) + refuse + step(0x06, 0x7FFF0000))
    bubblewrap.SEARCHED = sys.argv[1]
    sandbox = open_sandbox("ns")
    print(sandbox.name, sandbox.open(None, Limits()).run(["echo", "ran"]).stdout)
"""


@needs_bwrap
def test_where_namespaces_fail_bubblewrap_is_used_and_said(temporary: Path) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(OLD_KERNEL), bubblewrap.SEARCHED]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    result = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == "bwrap b'ran\\n'\n"
    assert result.stderr.startswith("sandbox: bwrap instead of ns, since ")
    assert len(result.stderr.splitlines()) == 1
    assert list(temporary.iterdir()) == []  # although the jail was never closed


def test_where_bubblewrap_fails_too_the_first_reason_is_given() -> None:
    argv = [sys.executable, "-c", textwrap.dedent(OLD_KERNEL), "/nowhere"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "SandboxError: the sandbox cannot put up its layer" in result.stderr
    assert "bubblewrap" not in result.stderr.splitlines()[-1]
