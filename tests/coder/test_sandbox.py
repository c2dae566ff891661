"""What the sandbox promises, one property a test: attacks that must fail, and normal use that must work."""

from __future__ import annotations

import io
import os
import platform
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

from nano_coder.sandbox.launcher import seccomp, zygote
from nano_coder.sandbox.namespaces import NsJail, NsSandbox
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox, open_sandbox
from nano_coder.sandbox.root_plan import find_interpreter, remedy
from nano_shared.errors import SandboxError, UsageError
from nano_shared.snapshot import SnapshotError
from nano_shared.types import Limits

SYSTEM_PYTHON = "/usr/bin/python3"
SECRET = "sk-not-a-real-key-8d1f0c"
MACHINE = platform.machine()
DENIED = seccomp.denied(MACHINE) if MACHINE in seccomp.MACHINES else {}


needs_system_python = pytest.mark.skipif(
    not Path(SYSTEM_PYTHON).exists(), reason=f"no interpreter at {SYSTEM_PYTHON}"
)


class OnDemand:
    """The same sandbox, with each jail made for the purpose though one may be waiting."""

    def __init__(self, sandbox: NsSandbox) -> None:
        self._sandbox = sandbox

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        return self._sandbox.open_new(workspace, limits)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sandbox, name)


@pytest.fixture(scope="module", params=["warm", pytest.param("on-demand", marks=pytest.mark.slow)])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    found = NsSandbox()
    return found if request.param == "warm" else OnDemand(found)  # type: ignore[return-value]


@pytest.fixture
def jail(sandbox: Sandbox) -> Iterator[Jail]:
    with closing(sandbox.open(None, Limits(memory_mb=256, tool_seconds=60))) as jail:
        yield jail


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A workspace with the kinds of entries that projects have."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.py").write_text("print('hello')\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("src/main.py")
    return tmp_path


def python(jail: Jail, code: str, **options: object) -> ExecResult:
    return jail.run(["python", "-c", textwrap.dedent(code)], **options)  # type: ignore[arg-type]


def shell(jail: Jail, line: str, **options: object) -> ExecResult:
    return jail.run(["sh", "-c", line], **options)  # type: ignore[arg-type]


def names(tar: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return archive.getnames()


def member(tar: bytes, name: str) -> tarfile.TarInfo:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return archive.getmember(name)


def eventually(holds: Callable[[], bool]) -> bool:
    """Poll a fact about other processes that the kernel brings about in its own time."""
    for _ in range(6000):
        if holds():
            return True
        time.sleep(0.02)
    return False


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, by the host's process table."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, pending = set(), [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending.extend(below)
    return found


def sleepers(pid: int) -> list[int]:
    """Processes below `pid` whose program is `sleep`."""
    return [below for below in descendants(pid) if name_of(below) == "sleep"]


def settled() -> tuple[int, int, str]:
    """Processes below, open files and mounts of this process, once they have stayed the same for a while."""
    seen: list[tuple[int, int, str]] = []
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        fds = os.listdir("/proc/self/fd")
        seen.append((len(descendants(os.getpid())), len(fds), Path("/proc/self/mountinfo").read_text()))
        time.sleep(0.3)
    return seen[-1]


def started(command: str) -> list[str]:
    """Processes of this machine with this command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_text(errors="replace") == command:
                found.append(entry.name)
        except OSError:
            continue
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------ normal use


def test_output_and_exit_code_come_back(jail: Jail) -> None:
    result = shell(jail, "echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == (b"out\n", b"err\n", 3, None)
    assert not result.ok


def test_a_signal_is_reported_as_a_signal(jail: Jail) -> None:
    result = python(jail, "import os; os.kill(os.getpid(), 9)")
    assert (result.exit_code, result.signal, result.oom, result.timed_out) == (None, 9, False, False)


def test_a_missing_program_is_a_result(jail: Jail) -> None:
    result = jail.run(["no-such-program"])
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


def test_a_file_that_may_not_run_is_a_result(jail: Jail) -> None:
    jail.write("plain.txt", b"text")
    assert jail.run(["./plain.txt"]).exit_code == 126


def test_stdin_is_given(jail: Jail) -> None:
    data = bytes(range(256)) * 4096
    assert jail.run(["cat"], stdin=data, output_bytes=len(data)).stdout == data


def test_stdin_is_empty_unless_given(jail: Jail) -> None:
    assert python(jail, "import sys; print(repr(sys.stdin.read()))").stdout == b"''\n"


def test_unicode_survives_arguments_environment_and_names(jail: Jail) -> None:
    text = "naïve 日本 🦎"
    jail.write(f"{text}.txt", text.encode())
    result = python(
        jail,
        "import os, sys; print(os.listdir('.')[0], os.environ['WORD'], sys.argv)",
        env={"WORD": text},
    )
    assert result.stdout.decode().startswith(f"{text}.txt {text} ")


def test_bytes_that_are_no_text_are_returned_as_they_are(jail: Jail) -> None:
    assert shell(jail, r"printf '\377\000\376'").stdout == b"\xff\x00\xfe"


def test_python_on_the_path_is_the_chosen_interpreter(jail: Jail, sandbox: Sandbox) -> None:
    assert python(jail, "import sys; print(sys.executable)").stdout.decode().strip() == sandbox.python
    assert jail.run([sandbox.python, "-c", "print(1)"]).stdout == b"1\n"


def test_pytest_runs_inside(jail: Jail) -> None:
    jail.write("test_it.py", b"def test_it():\n    assert 1 + 1 == 2\n")
    result = jail.run(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"])
    assert b"1 passed" in result.stdout, result


def test_processes_threads_and_temporary_files_work(jail: Jail) -> None:
    code = """
        import multiprocessing, subprocess, sys, tempfile, threading
        thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
        with multiprocessing.Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        with tempfile.NamedTemporaryFile() as file:
            print(file.name.startswith("/tmp/"))
        print(subprocess.run(["echo", "child"], capture_output=True).stdout)
    """
    result = python(jail, code)
    assert result.stdout == b"thread\n[1, 2]\nTrue\nb'child\\n'\n", result


def test_loopback_connects_two_programs_of_one_run(jail: Jail) -> None:
    code = """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        server.accept()[0].sendall(b"over loopback")
        print(client.recv(64))
    """
    assert python(jail, code).stdout == b"b'over loopback'\n"


def test_signals_have_their_default_actions(jail: Jail) -> None:
    # a Python parent ignores SIGPIPE; its children must not inherit that
    ignored = int(shell(jail, "trap '' USR1; grep SigIgn /proc/self/status").stdout.split()[1], 16)
    of_libc = 1 << 31 | 1 << 32  # signals 32 and 33, which no program of ours can set
    assert ignored & ~of_libc == 1 << 9


def test_the_environment_is_fixed_and_can_be_added_to(jail: Jail) -> None:
    names = set(python(jail, "import os; print(*os.environ)", env={"EXTRA": "1"}).stdout.decode().split())
    assert names == {
        "PATH", "HOME", "TMPDIR", "USER", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "LSAN_OPTIONS",
        "EXTRA",
    }  # fmt: skip


def test_equal_runs_see_equal_worlds(sandbox: Sandbox, project: Path) -> None:
    line = "pwd; hostname; id; env | sort; echo $$; ls -laR /work /tmp /dev/shm; cat /etc/passwd /etc/hosts"

    def look() -> bytes:
        with closing(sandbox.open(project, Limits())) as jail:
            # the clock is the machine's: only the times of what the workspace holds are ours
            return shell(jail, f"{{ {line}; }} | grep -v ' \\.\\.*$'").stdout

    assert look() == look()


def test_the_workspace_is_copied_with_modes_and_symlinks(sandbox: Sandbox, project: Path) -> None:
    with closing(sandbox.open(project, Limits())) as jail:
        result = shell(jail, "readlink link; cat link; ./run.sh")
    assert result.stdout == b"src/main.py\nprint('hello')\nran\n"


def test_repositories_and_caches_are_not_copied(sandbox: Sandbox, project: Path) -> None:
    for name in (".git", ".venv", "node_modules", "__pycache__"):
        (project / name).mkdir()
        (project / name / "file").write_text("x")
    with closing(sandbox.open(project, Limits())) as jail:
        assert names(jail.snapshot()) == ["link", "run.sh", "src", "src/main.py"]


def test_special_files_of_the_workspace_are_skipped(sandbox: Sandbox, project: Path) -> None:
    os.mkfifo(project / "pipe")
    with closing(sandbox.open(project, Limits())) as jail:
        assert "pipe" not in names(jail.snapshot())


def test_files_stay_between_runs(jail: Jail) -> None:
    shell(jail, "echo kept > file")
    assert shell(jail, "cat file").stdout == b"kept\n"


def test_processes_do_not_stay_between_runs(jail: Jail) -> None:
    shell(jail, "setsid sleep 1000 >/dev/null 2>&1 & setsid sh -c 'sleep 1; echo alive > /work/alive' &")
    seen = shell(jail, "sleep 1.5; ls /proc | grep -c '^[0-9]*$'; ls /work")
    # init, the shell, ls and grep; nothing from before
    assert seen.stdout == b"4\n"


def test_temporary_files_do_not_stay_between_runs(jail: Jail) -> None:
    shell(jail, "echo x > /tmp/file; echo x > /dev/shm/file")
    assert shell(jail, "ls -A /tmp /dev/shm").stdout == b"/dev/shm:\n\n/tmp:\n"


def test_a_run_ends_when_its_program_ends(jail: Jail) -> None:
    # the background child holds stdout open; waiting for end of file would take the whole time limit
    result = shell(jail, "echo done; sleep 1000 &", timeout=50)
    assert (result.stdout, result.timed_out) == (b"done\n", False)


def test_many_jails_at_once(sandbox: Sandbox) -> None:
    answers: dict[int, bytes] = {}

    def work(index: int) -> None:
        with closing(sandbox.open(None, Limits())) as jail:
            jail.write("who", str(index).encode())
            answers[index] = shell(jail, "cat who").stdout

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: str(index).encode() for index in range(6)}


def test_a_jail_outlives_the_thread_that_opened_it(sandbox: Sandbox) -> None:
    opened: list[Jail] = []
    thread = threading.Thread(target=lambda: opened.append(sandbox.open(None, Limits())))
    thread.start()
    thread.join()
    with closing(opened[0]) as jail:
        assert shell(jail, "sleep 0.2; echo here").stdout == b"here\n"


# ---------------------------------------------------------------------------------------- limits


def test_a_time_out_keeps_what_was_written(jail: Jail) -> None:
    result = stopped_after_output(lambda seconds: shell(jail, "echo partial; sleep 1000", timeout=seconds))
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, b"partial\n")
    assert not result.ok


def test_a_time_out_kills_children_and_grandchildren(jail: Jail) -> None:
    shell(jail, "sh -c 'setsid sleep 1000 & sleep 1000' & sleep 1000", timeout=0.5)
    assert sleepers(os.getpid()) == []


def test_a_program_that_ignores_every_signal_is_killed(jail: Jail) -> None:
    code = """
        import signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(1000)
    """
    assert python(jail, code, timeout=0.5).timed_out


def test_output_is_cut_in_the_middle(jail: Jail) -> None:
    result = python(jail, "print('H' * 5000 + 'M' * 90_000 + 'T' * 4999)", output_bytes=10_000)
    assert result.stdout == b"H" * 5000 + b"T" * 4999 + b"\n"
    assert (result.stdout_bytes, result.truncated, result.exit_code) == (100_000, True, 0)


def test_output_within_the_cap_is_whole(jail: Jail) -> None:
    result = python(jail, "print('x' * 9_999)", output_bytes=10_000)
    assert (len(result.stdout), result.truncated) == (10_000, False)


def test_both_streams_are_capped_apart(jail: Jail) -> None:
    result = python(jail, "import sys; print('o' * 3000); print('e' * 50, file=sys.stderr)", output_bytes=100)
    assert (len(result.stdout), result.stdout_bytes, result.stderr_bytes) == (100, 3001, 51)


def test_a_flood_of_output_is_killed(jail: Jail) -> None:
    result = jail.run(["yes"], output_bytes=4096)
    assert (result.signal, result.timed_out, len(result.stdout)) == (9, False, 4096)
    assert result.stdout_bytes > 64 << 20


def test_one_process_cannot_take_more_memory_than_its_limit(jail: Jail) -> None:
    result = python(jail, "import time; x = b'x' * (512 << 20); time.sleep(60); print('got it')")
    assert (result.oom, result.timed_out, result.stdout) == (True, False, b"")


def test_addresses_are_no_memory(jail: Jail) -> None:
    """As WebAssembly, the JVM, Go and sanitizers reserve them, and a database maps a file with holes."""
    code = """
        import mmap, os
        reserved = [mmap.mmap(-1, 10 << 30, flags=mmap.MAP_PRIVATE | 0x4000) for _ in range(3)]
        with open("/tmp/holes", "w+b") as file:
            os.truncate(file.fileno(), 8 << 30)
            mapped = mmap.mmap(file.fileno(), 8 << 30)
        reserved[0][9 << 30] = mapped[7 << 30] = 1
        print("mapped")
    """
    assert python(jail, code).stdout == b"mapped\n"


def test_page_tables_of_untouched_memory_count(jail: Jail) -> None:
    code = """
        import mmap, time
        held = [mmap.mmap(-1, 1 << 37, flags=mmap.MAP_PRIVATE | 0x4000) for _ in range(4)]
        for each in held:
            each.madvise(mmap.MADV_NOHUGEPAGE)
            for place in range(0, 1 << 37, 1 << 21):
                each[place]
        time.sleep(60)
    """
    result = python(jail, code)
    assert (result.oom, result.timed_out) == (True, False)


def test_processes_together_cannot_take_more_memory_than_the_limit(jail: Jail) -> None:
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


def test_memory_shared_by_forks_counts_once(jail: Jail) -> None:
    code = """
        import os, time
        held = b"x" * (100 << 20)
        for _ in range(6):
            if os.fork() == 0:
                time.sleep(0.5)
                os._exit(0)
        for _ in range(6):
            os.wait()
        print("fine")
    """
    assert python(jail, code).stdout == b"fine\n"


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


@pytest.fixture
def roomy(sandbox: Sandbox) -> Iterator[Jail]:
    """With more memory than its file systems take, since what they hold counts as memory."""
    with closing(sandbox.open(None, Limits(memory_mb=2048, tool_seconds=60))) as jail:
        yield jail


def test_the_workspace_has_a_size(roomy: Jail) -> None:
    line = "for i in 1 2 3 4 5; do head -c 200M /dev/zero > $i || exit 1; done"
    assert shell(roomy, line).exit_code == 1


def test_temporary_space_has_a_size(roomy: Jail) -> None:
    line = "for i in 1 2 3; do head -c 200M /dev/zero > /tmp/$i || exit 1; done"
    assert shell(roomy, line).exit_code == 1
    assert shell(roomy, "head -c 100M /dev/zero > /dev/shm/x").exit_code != 0


def test_the_number_of_files_is_bounded(jail: Jail) -> None:
    result = python(jail, "for i in range(70_000): open(f'/tmp/{i}', 'w').close()")
    assert b"No space left" in result.stderr


def test_open_files_are_bounded(jail: Jail) -> None:
    result = python(jail, "import os; [os.open('/dev/null', 0) for _ in range(300)]")
    assert b"Too many open files" in result.stderr


def test_no_core_is_dumped(jail: Jail) -> None:
    assert python(jail, "import os; os.abort()").signal == signal.SIGABRT
    assert names(jail.snapshot()) == []


# --------------------------------------------------------------------------------------- escapes


def test_the_network_cannot_be_reached(jail: Jail) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(listener):
        code = f"""
            import socket
            for address in (("127.0.0.1", {listener.getsockname()[1]}), ("192.0.2.1", 80), ("8.8.8.8", 53)):
                try: socket.create_connection(address, 2); print("reached", address)
                except OSError as error: print(type(error).__name__)
        """
        assert python(jail, code).stdout == b"ConnectionRefusedError\nOSError\nOSError\n"


def test_abstract_sockets_of_the_host_cannot_be_reached(jail: Jail) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0nano-test-{os.getpid()}")
        listener.listen()
        result = python(jail, f"import socket; socket.socket(1).connect('\\0nano-test-{os.getpid()}')")
    assert b"ConnectionRefusedError" in result.stderr


@pytest.mark.parametrize("family", [16, 17, 38, 40], ids=["netlink", "packet", "alg", "vsock"])
def test_only_common_socket_families_exist(jail: Jail, sandbox: Sandbox, family: int) -> None:
    if not sandbox.layers["seccomp"]:
        pytest.skip("no seccomp table for this machine")
    result = python(jail, f"import socket; socket.socket({family}, socket.SOCK_DGRAM)")
    assert b"Address family not supported" in result.stderr


@pytest.mark.some(6)
@pytest.mark.parametrize("name", sorted(DENIED))
def test_dangerous_system_calls_are_refused(shared_jail: Jail, sandbox: Sandbox, name: str) -> None:
    if not sandbox.layers["seccomp"]:
        pytest.skip("no seccomp table for this machine")
    call = f"libc.syscall({DENIED[name]}, 0, 0, 0, 0, 0, 0)"
    code = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print({call}, ctypes.get_errno())"
    said = f"-1 {error}" if (error := seccomp.answer(name)) else "0 0"
    assert shared_jail.run(["python", "-I", "-S", "-c", code]).stdout.decode() == f"{said}\n"


@pytest.fixture(scope="module")
def shared_jail(sandbox: Sandbox) -> Iterator[Jail]:
    """For properties that leave nothing behind."""
    with closing(sandbox.open(None, Limits())) as jail:
        yield jail


def test_a_nested_user_namespace_is_refused(jail: Jail) -> None:
    assert shell(jail, "unshare -U true").exit_code != 0
    assert shell(jail, "cat /proc/sys/user/max_user_namespaces").stdout == b"0\n"


def test_files_of_the_host_are_invisible(jail: Jail, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    code = f"""
        import os
        for path in ({str(tmp_path / "secret")!r}, "/etc/shadow", "/var", "/sys/kernel", "/run", "/boot"):
            print(os.path.exists(path))
    """
    assert set(python(jail, code).stdout.split()) == {b"False"}


def test_home_folders_hold_no_more_than_the_interpreter(jail: Jail) -> None:
    code = """
        import os, sys
        prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
        for top, folders, files in (found for home in ("/root", "/home") for found in os.walk(home)):
            if top in prefixes: folders.clear()
            elif files: print(top, files)
            elif not any(prefix.startswith(top + "/") for prefix in prefixes): print(top)
    """
    assert python(jail, code).stdout == b""


def test_the_secrets_of_the_agent_are_in_no_environment_and_no_memory(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    code = f"""
        import glob, os
        me = str(os.getpid())
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/mem") + glob.glob("/proc/*/cmdline"):
            if path.split("/")[2] in (me, "self", "thread-self"): continue
            try: data = open(path, "rb").read(1 << 20)
            except OSError as error: print(path, type(error).__name__); continue
            print(path, {SECRET[:8]!r}.encode() + {SECRET[8:]!r}.encode() in data)
        print(*os.environ.values())
    """
    with closing(sandbox.open(None, Limits())) as jail:
        seen = python(jail, code).stdout.decode()
    assert "/proc/1/environ PermissionError" in seen
    assert "/proc/1/mem PermissionError" in seen
    assert "True" not in seen
    assert SECRET not in seen


def test_only_processes_of_the_run_are_visible(jail: Jail) -> None:
    code = "import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()), os.getpid())"
    assert python(jail, code).stdout == b"[1, 2] 2\n"


def test_a_program_cannot_end_or_limit_init(jail: Jail) -> None:
    code = """
        import os, resource
        for number in (9, 15, 19): os.kill(1, number)
        try: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)); print("limited")
        except PermissionError: print("refused")
        print("alive", flush=True)
        os._exit(5)
    """
    result = python(jail, code)
    assert (result.stdout, result.exit_code) == (b"refused\nalive\n", 5)


@pytest.mark.parametrize(
    "path",
    [
        "/file",
        "/usr/file",
        "/usr/bin/file",
        "/etc/passwd",
        "/dev/file",
        "/proc/sys/vm/swappiness",
        "/opt/file",
    ],
)
def test_nothing_outside_work_and_tmp_can_be_written(shared_jail: Jail, path: str) -> None:
    result = python(shared_jail, f"open({path!r}, 'a').write('1')")
    assert result.exit_code == 1
    assert b"Error: [Errno" in result.stderr


def test_the_interpreter_cannot_be_written(jail: Jail) -> None:
    code = """
        import os, pytest, sys
        for folder in (sys.prefix, sys.base_prefix, *map(os.path.dirname, (pytest.__file__, os.__file__))):
            try: open(os.path.join(folder, "evil.pth"), "w"); print("written", folder)
            except OSError: pass
    """
    assert python(jail, code).stdout == b""


def test_mounts_cannot_be_changed(jail: Jail) -> None:
    assert shell(jail, "mount -o remount,rw /usr || umount /proc || mount -t tmpfs x /usr").exit_code != 0


def test_programs_have_no_capabilities_and_gain_none(jail: Jail) -> None:
    status = shell(jail, "cat /proc/self/status").stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"


def test_no_program_runs_as_root_of_the_host(jail: Jail) -> None:
    owners: set[int] = set()

    def look() -> bool:
        owners.update(Path(f"/proc/{pid}").stat().st_uid for pid in sleepers(os.getpid()))
        return bool(owners)

    run = threading.Thread(target=jail.run, args=(["sleep", "1000"],), kwargs={"timeout": 2})
    run.start()
    assert eventually(look)
    run.join()
    assert 0 not in owners


def test_no_descriptor_of_ours_is_inherited(jail: Jail) -> None:
    assert shell(jail, "echo /proc/self/fd/*").stdout.split() == [
        b"/proc/self/fd/0", b"/proc/self/fd/1", b"/proc/self/fd/2", b"/proc/self/fd/3",
    ]  # fmt: skip


def test_there_is_no_terminal(jail: Jail) -> None:
    assert (
        b"OSError" in python(jail, "open('/dev/tty')").stderr
        or b"FileNotFoundError" in python(jail, "open('/dev/tty')").stderr
    )


def test_a_set_uid_bit_has_no_effect(jail: Jail) -> None:
    flags = "import os; print(*(os.statvfs(p).f_flag & 6 for p in ('/usr', '/work', '/tmp')))"
    assert python(jail, flags).stdout.split() == [b"%d" % (2 | 4)] * 3


@pytest.mark.parametrize("process", ["self", "1", "thread-self"])
def test_no_list_of_mounts_names_a_folder_of_the_host(jail: Jail, process: str) -> None:
    lists = " ".join(f"/proc/{process}/{name}" for name in ("mountinfo", "mounts", "mountstats"))
    told = shell(jail, f"cat {lists}")
    assert (told.stdout, jail.run(["ls", "/work"]).exit_code) == (b"", 0)


@pytest.mark.as_root
def test_each_jail_is_a_user_of_its_own_on_the_host(sandbox: Sandbox) -> None:
    if not sandbox.layers["host_uid_of_its_own"]:
        pytest.skip("the uids of this machine end below those for jails")
    with closing(sandbox.open(None, Limits())) as one, closing(sandbox.open(None, Limits())) as other:
        for jail in (one, other):
            assert python(jail, "import os; print(os.getresuid())").stdout == b"(1000, 1000, 1000)\n"
        mine = descendants(os.getpid())
        uids = [Path(f"/proc/{pid}").stat().st_uid for pid in mine if Path(f"/proc/{pid}").exists()]
        taken = {uid for uid in uids if uid in zygote.UIDS}
    assert len(taken) >= 3  # the launcher's, and those of two jails


# ----------------------------------------------------------------------------------------- files


def test_what_is_written_can_be_read(jail: Jail) -> None:
    data = os.urandom(3 << 20)
    jail.write("deep/down/file.bin", data)
    assert jail.read("deep/down/file.bin") == data
    assert shell(jail, "wc -c < deep/down/file.bin").stdout == b"3145728\n"


def test_writing_replaces_and_keeps_the_mode(jail: Jail) -> None:
    shell(jail, "echo long long text > file; chmod 755 file")
    jail.write("file", b"")
    assert jail.read("file") == b""
    assert shell(jail, "stat -c %a file").stdout == b"755\n"


def test_reading_what_is_not_there(jail: Jail) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        jail.read("nothing")


def test_reading_a_directory(jail: Jail) -> None:
    shell(jail, "mkdir folder")
    with pytest.raises(IsADirectoryError):
        jail.read("folder")
    with pytest.raises(IsADirectoryError):
        jail.write("folder", b"x")


def test_reading_what_the_program_may_not_read(jail: Jail) -> None:
    shell(jail, "echo x > closed; chmod 000 closed")
    with pytest.raises(PermissionError):
        jail.read("closed")


def test_reading_a_pipe_does_not_wait(jail: Jail) -> None:
    shell(jail, "mkfifo pipe")
    with pytest.raises(PermissionError, match="not a regular file"):
        jail.read("pipe")


@pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd", "a/../../etc/passwd", "out/passwd", "proc"])
def test_file_operations_do_not_leave_the_workspace(jail: Jail, path: str) -> None:
    shell(jail, "ln -s /etc out; ln -s /proc/self/root/etc/passwd proc; mkdir a")
    with pytest.raises(PermissionError):
        jail.read(path)
    with pytest.raises(PermissionError):
        jail.write(path, b"x")


def test_a_symlink_within_the_workspace_is_followed(jail: Jail) -> None:
    shell(jail, "mkdir real; ln -s real alias")
    jail.write("alias/file", b"text")
    assert jail.read("real/file") == b"text"


def test_a_snapshot_holds_files_directories_symlinks_and_modes(sandbox: Sandbox, project: Path) -> None:
    with closing(sandbox.open(project, Limits())) as jail:
        shell(jail, "mkdir empty __pycache__; mkfifo pipe; echo x > closed; chmod 000 closed; ln run.sh hard")
        tar = jail.snapshot()
    assert names(tar) == ["closed", "empty", "hard", "link", "pipe", "run.sh", "src", "src/main.py"]
    assert member(tar, "pipe").isfifo()
    assert member(tar, "empty").isdir()
    assert (member(tar, "link").issym(), member(tar, "link").linkname) == (True, "src/main.py")
    assert (member(tar, "run.sh").mode, member(tar, "closed").mode) == (0o755, 0)
    assert member(tar, "hard").isreg()
    assert {entry.uid for entry in map(lambda name: member(tar, name), names(tar))} == {0}


def test_equal_workspaces_have_equal_snapshots(sandbox: Sandbox, project: Path) -> None:
    with (
        closing(sandbox.open(project, Limits())) as first,
        closing(sandbox.open(project, Limits())) as second,
    ):
        shell(second, "touch run.sh")
        assert first.snapshot() == second.snapshot()


def test_a_snapshot_can_be_restored(sandbox: Sandbox, jail: Jail, project: Path) -> None:
    with closing(sandbox.open(project, Limits())) as other:
        tar = other.snapshot()
    shell(jail, "mkdir -p left/over; echo x > left/over/file; chmod 000 left")
    jail.restore(tar)
    assert jail.snapshot() == tar


def test_a_tree_too_deep_to_name_harms_neither_snapshot_nor_close(jail: Jail) -> None:
    code = """
        import os
        open("file", "w").close()
        for _ in range(3000):
            os.mkdir("deep")
            os.chdir("deep")
    """
    before = jail.snapshot()
    assert python(jail, code).exit_code == 0
    with pytest.raises(SnapshotError, match="more than 64 folders lie below each other"):
        jail.snapshot()
    jail.restore(before)
    assert jail.snapshot() == before


def test_a_hostile_snapshot_changes_nothing_outside(jail: Jail) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        link = tarfile.TarInfo("door")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("door/evil"))
    with pytest.raises(UsageError):
        jail.restore(stream.getvalue())


def test_the_original_workspace_is_untouched(sandbox: Sandbox, project: Path) -> None:
    before = {path: path.lstat() for path in sorted(project.rglob("*"))}
    with closing(sandbox.open(project, Limits())) as jail:
        shell(jail, "rm -rf * ; echo new > file; mkdir folder")
    after = {path: path.lstat() for path in sorted(project.rglob("*"))}
    assert [(p, s.st_mtime_ns, s.st_size, s.st_mode) for p, s in before.items()] == [
        (p, s.st_mtime_ns, s.st_size, s.st_mode) for p, s in after.items()
    ]


# -------------------------------------------------------------------------------- life and death


def test_closing_leaves_no_process_mount_or_file(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(2):  # from the second jail on, others are made ahead, and stay
        sandbox.open(None, Limits()).close()
    before = settled()
    jail = sandbox.open(None, Limits())
    shell(jail, "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a; ln -s / root")
    jail.close()
    jail.close()
    assert eventually(lambda: settled() == before)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_jail_says_so(sandbox: Sandbox) -> None:
    jail = sandbox.open(None, Limits())
    jail.close()
    with pytest.raises(SandboxError, match="closed"):
        jail.run(["true"])


def test_closing_ends_a_run_in_another_thread(sandbox: Sandbox) -> None:
    jail = sandbox.open(None, Limits())
    failures: list[SandboxError] = []

    def work() -> None:
        try:
            jail.run(["sleep", "1000"], timeout=100)
        except SandboxError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: sleepers(os.getpid()) != [])
    jail.close()
    thread.join()
    assert len(failures) == 1


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_death_of_the_agent_leaves_nothing_behind(number: signal.Signals) -> None:
    code = """
        from nano_coder.sandbox.protocol import open_sandbox
        from nano_shared.types import Limits
        jail = open_sandbox("ns").open(None, Limits())
        jail.run(["sh", "-c", "setsid sleep 1000 & sleep 1000"], timeout=500)
    """
    agent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    assert eventually(lambda: len(sleepers(agent.pid)) == 2)
    below = descendants(agent.pid)
    agent.send_signal(number)
    agent.wait()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


# ------------------------------------------------------------------------------- refusals, errors


def test_a_missing_workspace_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        sandbox.open(tmp_path / "nowhere", Limits())


def test_a_workspace_must_be_a_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a directory"):
        sandbox.open(tmp_path / "file", Limits())


@pytest.mark.as_user
def test_an_unreadable_workspace_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UsageError, match="closed"):
        sandbox.open(tmp_path / "closed", Limits())


def test_limits_built_around_their_validation_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(UsageError, match="memory_mb"):
        sandbox.open(None, Limits.model_construct(tool_seconds=1.0, memory_mb=-1, output_bytes=1024))


@pytest.mark.parametrize(
    ("argv", "options", "said"),
    [
        ([], {}, "argv"),
        (["a\0b"], {}, "NUL"),
        (["true"], {"timeout": 0.0}, "timeout"),
        (["true"], {"timeout": float("nan")}, "timeout"),
        (["true"], {"env": {"A=B": "1"}}, "variable"),
        (["true"], {"output_bytes": 0}, "output_bytes"),
    ],
)
def test_what_no_program_can_be_given_is_refused(
    shared_jail: Jail, argv: list[str], options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        shared_jail.run(argv, **options)  # type: ignore[arg-type]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="ns, bwrap, none, podman"):
        open_sandbox("docker")


def test_a_folder_that_only_pretends_to_be_an_environment_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to("/bin/sh")
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /home/user/bin\n")
    with pytest.raises(SandboxError, match="no Python installation"):
        find_interpreter(str(tmp_path / "venv/bin/python"))


@needs_system_python
def test_an_interpreter_without_an_environment_runs() -> None:
    sandbox = open_sandbox("ns", python=SYSTEM_PYTHON)
    with closing(sandbox.open(None, Limits())) as jail:
        said = python(jail, "import sys; print(sys.prefix)").stdout
    assert said == b"/usr\n"


@needs_system_python
def test_an_environment_where_the_jail_has_its_own_files_is_moved(tmp_path: Path) -> None:
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip("temporary files are kept elsewhere")
    subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    sandbox = open_sandbox("ns", python=str(tmp_path / "venv/bin/python"))
    assert sandbox.python == "/opt/venv/bin/python"
    with closing(sandbox.open(None, Limits())) as jail:
        assert python(jail, "import sys; print(sys.prefix)").stdout == b"/opt/venv\n"


@needs_system_python
def test_the_links_behind_an_environment_are_followed() -> None:
    # in a folder that keeps its place inside, which the usual one for temporary files does not
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        home = Path(name)
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", home / "venv"], check=True)
        (home / "current").symlink_to(SYSTEM_PYTHON)
        (home / "venv/bin/python3").unlink()
        (home / "venv/bin/python3").symlink_to(home / "current")
        assert open_sandbox("ns", python=f"{home}/venv/bin/python").python == f"{home}/venv/bin/python"


def test_a_linked_folder_of_an_environment_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to("/usr/bin/python3")
    (tmp_path / "venv/lib").symlink_to("/")
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    mounted = find_interpreter(str(tmp_path / "venv/bin/python")).binds
    assert [source for source, _ in mounted if not source.startswith(str(tmp_path / "venv"))] == []


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"kernel.apparmor_restrict_unprivileged_userns": "1"}, "apparmor_restrict_unprivileged_userns=0"),
        ({"kernel.unprivileged_userns_clone": "0"}, "unprivileged_userns_clone=1"),
        ({"user.max_user_namespaces": "0"}, "user.max_user_namespaces="),
        ({}, "docker run"),
    ],
)
def test_each_failure_has_one_remedy(settings: dict[str, str], command: str) -> None:
    assert command in remedy("user_namespace", 1, is_root=False, setting=settings.get)


def test_a_machine_without_user_namespaces_is_refused_with_the_remedy() -> None:
    # a user namespace that allows none below it stands in for such a machine
    code = """
        import sys
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        from nano_coder.sandbox.protocol import open_sandbox
        try: open_sandbox("ns")
        except Exception as error: print(error.exit_code, error)
    """
    argv = [
        "unshare",
        "--user",
        "--map-root-user",
        "--keep-caps",
        sys.executable,
        "-c",
        textwrap.dedent(code),
    ]
    said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    assert said.startswith("6 ")
    assert "user_namespace" in said


def test_every_layer_is_reported(sandbox: Sandbox) -> None:
    # an ordinary user has but one uid to give
    off = {"seccomp", "landlock", "cgroup"} | ({"host_uid_of_its_own"} if os.geteuid() else set())
    assert {name for name, on in sandbox.layers.items() if not on} <= off


def test_the_self_test_notices_what_an_open_jail_would_allow(sandbox: Sandbox, jail: NsJail) -> None:
    held = jail.probe(Path("/etc/passwd"))
    assert held.pop("mount_namespace") is False  # this one file can be read
    assert set(held.values()) == {True}


# ----------------------------------------------------------------------------------- unconfined


def test_no_sandbox_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANO_ALLOW_NO_SANDBOX", raising=False)
    with pytest.raises(SandboxError, match="NANO_ALLOW_NO_SANDBOX=1"):
        open_sandbox("none")


@pytest.fixture
def open_jail(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, project: Path
) -> Iterator[Jail]:
    monkeypatch.setenv("NANO_ALLOW_NO_SANDBOX", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("jails")))
    with closing(open_sandbox("none").open(project, Limits())) as jail:
        yield jail


def test_unconfined_runs_keep_the_contract(open_jail: Jail, project: Path) -> None:
    result = shell(open_jail, "cat link; echo new > src/new; exit 4")
    assert (result.stdout, result.exit_code) == (b"print('hello')\n", 4)
    assert open_jail.read("src/new") == b"new\n"
    assert not (project / "src/new").exists()


def test_unconfined_time_outs_kill_the_group(open_jail: Jail) -> None:
    line = "echo partial; sleep 1234 & sleep 1234"
    result = stopped_after_output(lambda seconds: shell(open_jail, line, timeout=seconds))
    assert (result.timed_out, result.stdout) == (True, b"partial\n")
    # an orphan is no longer below this process: looked for among all
    assert eventually(lambda: started("sleep\x001234\x00") == [])


def test_unconfined_file_operations_stay_in_the_workspace(open_jail: Jail) -> None:
    shell(open_jail, "ln -s /etc out")
    for path in ("../x", "/etc/passwd", "out/passwd"):
        with pytest.raises(PermissionError):
            open_jail.read(path)


def test_unconfined_jails_remove_their_copy(open_jail: Jail, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shell(open_jail, "mkdir -p a/b; touch a/b/c; chmod 000 a/b a; pwd").stdout.decode().strip()
    open_jail.close()
    open_jail.close()
    assert not Path(folder).parent.exists()


def test_an_interpreter_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(UsageError, match="no interpreter at '/nowhere/python'"):
        open_sandbox("ns", python="/nowhere/python")
