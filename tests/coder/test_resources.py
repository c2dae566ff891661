"""What a program takes of the kernel meets a limit, its jail outlives it, and no other jail misses it."""

from __future__ import annotations

import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from nano_coder.sandbox.protocol import Jail, open_sandbox
from nano_shared.types import Limits

_SPEC = importlib.util.spec_from_file_location(
    "sandbox_memory", Path(__file__).parents[2] / "benchmarks/sandbox_memory.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_BENCHMARK = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_BENCHMARK)
ATTACKS: dict[str, str] = _BENCHMARK.ATTACKS
LIMITS = Limits(memory_mb=64, tool_seconds=60)

TAKE = {
    "watchers of files": """
import ctypes
inotify_init = ctypes.CDLL(None).inotify_init
count = lambda: len([fd for fd in iter(inotify_init, -1)])
""",
    "descriptors in flight": """
import socket
held = []
def count():
    sent = 0
    try:
        while True:
            held.append(socket.socketpair())
            held[-1][0].setblocking(False)
            try:
                while True:
                    socket.send_fds(held[-1][0], [b"x"], [0] * 10)
                    sent += 10
            except BlockingIOError:
                pass
    except OSError:
        return sent
""",
    "full pipes": """
import os
held = []
def count():
    size = 0
    try:
        while True:
            held.append(os.pipe())
            os.set_blocking(held[-1][1], False)
            try:
                while True:
                    size += os.write(held[-1][1], b"x" * 4096)
            except BlockingIOError:
                pass
    except OSError:
        return size
""",
}


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_jail_outlives_what_its_program_takes(name: str) -> None:
    with closing(open_sandbox("ns").open(None, LIMITS)) as jail:
        jail.run_python(ATTACKS[name].replace("SECONDS", "1"), timeout=2)
        assert jail.run_python("print(1)").stdout == b"1\n"


@pytest.mark.parametrize("name", TAKE)
@pytest.mark.as_root
def test_what_one_jail_takes_another_still_has(name: str) -> None:
    sandbox = open_sandbox("ns")
    if not sandbox.layers["host_uid_of_its_own"]:
        pytest.skip("the uids of this machine end below those for jails")
    with closing(sandbox.open(None, LIMITS)) as one, closing(sandbox.open(None, LIMITS)) as other:
        alone = _taken(one, TAKE[name])
        ours, theirs = socket.socketpair()
        holding = TAKE[name] + "import os\nos.write(0, str(count()).encode())\nos.read(0, 1)"
        with ours, theirs, ThreadPoolExecutor(1) as thread:
            held = thread.submit(one.run_python, holding, stdin=theirs.fileno())
            assert int(ours.recv(100)) == alone
            assert _taken(other, TAKE[name]) == alone
            ours.send(b"x")
            held.result()


def _taken(jail: Jail, source: str) -> int:
    return int(jail.run_python(f"{source}print(count())").stdout)


@pytest.mark.some(4)
@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
@pytest.mark.parametrize(
    "make", ["open(n, 'x').close()", "os.mkdir(n)", "os.symlink('x', n)", "os.link('one', n)"]
)
def test_files_folders_and_links_are_counted(folder: str, make: str) -> None:
    source = f"""
import os
os.chdir({folder!r})
open("one", "x").close()
made = 0
try:
    while made < 50_000:
        n = str(made)
        {make}
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    with closing(open_sandbox("ns").open(None, LIMITS)) as jail:
        made, number = map(int, jail.run_python(source).stdout.split())
        assert (made <= 20_000, number) == (True, 28)
        if folder == "/work":
            with pytest.raises(OSError, match="No space"):
                jail.write("further", b"x")
            jail.run(["sh", "-c", "rm -r 1"])
            jail.write("further", b"x")
            assert jail.read("further") == b"x"


def test_many_files_are_charged_as_memory() -> None:
    """Empty ones too: a program that keeps 38,000 holds some 38 MB of the kernel's."""
    source = (
        "import time\nfor n in range(38_000): open(f\"/{'tmp' if n % 2 else 'work'}/{n}\", 'x').close()\n"
    )
    source += "time.sleep(60)"
    with closing(open_sandbox("ns").open(None, Limits(memory_mb=32, tool_seconds=60))) as jail:
        assert jail.run_python(source).oom


@pytest.mark.parametrize("kind", ["F_WRLCK", "F_RDLCK"])
def test_locks_are_counted_wherever_they_lie(kind: str) -> None:
    place = "/tmp/locks" if kind == "F_WRLCK" else "/usr/lib/os-release"
    source = f"""
import fcntl, struct
with open({place!r}, "w+b" if {kind == "F_WRLCK"} else "rb") as file:
    for n in range(3_000_000):
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.{kind}, 0, 2 * n, 1, 0))
"""
    with closing(open_sandbox("ns").open(None, Limits(memory_mb=1024, tool_seconds=60))) as jail:
        assert jail.run_python(source).oom
        few = source.replace("3_000_000", "1000") + "print('locked')"
        assert jail.run_python(few).stdout == b"locked\n"


def test_a_database_still_locks_its_file() -> None:
    source = (
        "import sqlite3\nwith sqlite3.connect('a.db') as db: db.execute('create table t (x)')\nprint('made')"
    )
    with closing(open_sandbox("ns").open(None, LIMITS)) as jail:
        assert jail.run_python(source).stdout == b"made\n"


def test_metadata_is_copied_though_attributes_are_not() -> None:
    line = "echo 1 > a; cp -a a b && install -m 600 a c && mv a d && tar cf t b c d && tar xf t && cat b c d"
    with closing(open_sandbox("ns").open(None, LIMITS)) as jail:
        done = jail.run(["sh", "-c", line])
        assert (done.stdout, done.stderr) == (b"1\n1\n1\n", b"")
        copied = "import shutil; shutil.copytree('/work', '/tmp/copy'); shutil.copy2('b', 'e'); print(1)"
        assert jail.run_python(copied).stdout == b"1\n"
