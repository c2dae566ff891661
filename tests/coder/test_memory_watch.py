"""The watch on a jail's memory: whatever holds it, all of it together stays below the limit."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from statistics import median

import pytest

from nano_coder.sandbox.launcher import memory
from nano_coder.sandbox.launcher.memory import SocketMemory
from nano_coder.sandbox.protocol import Jail, open_sandbox
from nano_shared.types import Limits

MB = 1 << 20


@pytest.fixture
def jail() -> Iterator[Jail]:
    with closing(open_sandbox("ns").open(None, Limits(memory_mb=96, tool_seconds=60))) as opened:
        yield opened


_FORKS = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = b"x" * (40 << 20)
        time.sleep(60)
time.sleep(60)
"""
_FILES = """
import time
for n in range(30):
    with open(f"{FOLDER}/{n}", "wb") as file:
        file.write(b"x" * (6 << 20))
time.sleep(60)
"""
_SHARED = """
import mmap, os, time
for _ in range(4):
    if os.fork() == 0:
        held = mmap.mmap(-1, 40 << 20)
        for _ in range(40):
            held.write(b"x" * (1 << 20))
        time.sleep(60)
time.sleep(60)
"""
_UNIX_SOCKETS = """
import os, resource, socket, time
for _ in range(12):
    if os.fork() == 0:
        held = []
        for _ in range(110):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            held.append((ours, theirs))
            try:
                while True:
                    ours.send(b"x" * 65536)
            except BlockingIOError:
                pass
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "program",
    [_FORKS, *(_FILES.replace("{FOLDER}", folder) for folder in ("/work", "/tmp")), _SHARED, _UNIX_SOCKETS],
    ids=["processes", "workspace", "tmp", "shared mappings", "sockets"],
)
def test_whatever_holds_memory_is_told_as_oom(jail: Jail, program: str) -> None:
    result = jail.run_python(program, timeout=40)
    assert (result.oom, result.timed_out, result.signal, result.exit_code) == (True, False, 9, None)
    # and it is the program's alone
    after = jail.run_python("print(1)")
    assert (after.stdout, after.oom) == (b"1\n", False)


def test_memory_that_is_shared_or_was_there_before_counts_once(jail: Jail) -> None:
    jail.write("big", b"x" * (80 * MB))
    shared = """
import mmap, os, time
held = mmap.mmap(-1, 20 << 20)
for _ in range(20):
    held.write(b"x" * (1 << 20))
children = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        for place in range(0, 20 << 20, 4096):
            held[place]
        time.sleep(0.6)
        os._exit(0)
    children.append(pid)
mapped = mmap.mmap(os.open("big", os.O_RDWR), 30 << 20)
for place in range(0, 30 << 20, 4096):
    mapped[place]
print(sum(os.waitpid(pid, 0)[1] for pid in children))
"""
    result = jail.run_python(shared, timeout=40)
    assert (result.stdout, result.oom) == (b"0\n", False)


def test_a_killed_program_is_not_told_as_oom(jail: Jail) -> None:
    result = jail.run_python("import os; os.kill(os.getpid(), 9)")
    assert (result.signal, result.oom) == (9, False)


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6])
def test_what_waits_in_sockets_is_counted(family: socket.AddressFamily) -> None:
    if family == socket.AF_UNIX:
        ours, theirs = socket.socketpair()
    else:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        with socket.create_server((host, 0), family=family) as server:
            ours = socket.create_connection(server.getsockname()[:2])
            theirs, _ = server.accept()
    grown = []
    with closing(SocketMemory()) as counter, ours, theirs:
        ours.settimeout(5)
        for _ in range(9):  # the sockets of other programs fill and drain meanwhile
            before = counter.in_use()
            sent = ours.send(b"x" * 65536)
            grown.append(counter.in_use() - before)
            while sent:
                sent -= len(theirs.recv(sent))
    assert median(grown) > 60_000


def test_the_watch_counts_what_is_added_to_a_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [500 * MB]
    monkeypatch.setattr(memory, "stored", lambda folders: held[0])
    monkeypatch.setattr(memory, "in_use", lambda: 50 * MB)
    monkeypatch.setattr(memory, "proportional", lambda: 40 * MB)
    watch = memory.MemoryWatch(100 * MB, ("/tmp",))
    assert not watch.exceeded()
    held[0] += 61 * MB
    assert watch.exceeded()
    held[0] = 0
    assert not watch.exceeded()


def test_a_program_whose_memory_stays_is_looked_at_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = [MB]
    monkeypatch.setattr(memory, "in_use", lambda: used[0])
    watch = memory.MemoryWatch(10 * MB, ())
    pauses = []
    for _ in range(6):
        assert not watch.exceeded()
        pauses.append(watch.pause_s)
    assert pauses == [0.05, 0.1, 0.2, 0.25, 0.25, 0.25]
    used[0] += 1
    assert not watch.exceeded()
    assert watch.pause_s == memory.WATCH_S
