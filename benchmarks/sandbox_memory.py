"""Kernel memory that attacks from inside a jail cost the machine, beyond the jail's limit.

    python benchmarks/sandbox_memory.py [--memory 64] [--seconds 8] [--only NAME ...]

Each attack runs in a jail of its own and holds what it took until it is ended. Printed are by how much
MemAvailable fell and slab rose while it ran, what ended it, and whether the jail answered afterwards. Exit
code 1 if an attack cost more than the limit and, beyond it, the larger of 64 MB and the limit. For an idle
machine: whatever else happens on it is counted as well.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from nano_coder.sandbox.protocol import open_sandbox
from nano_shared.types import Limits

_MB = 1 << 20
_ALLOWED_MB = 64
_FORKED = """
import os, time
for _ in range(60):
    if os.fork() == 0:
        break
held = []
try:
    while True:
        take(held)
except (OSError, ValueError):
    pass
time.sleep(600)
"""
_SOCKET = "import socket, struct\nfilters = struct.pack('HBBI', 6, 0, 0, 1) * 4000\n"

ATTACKS = {
    "extended attributes": """
import os, time
for folder in ("/work", "/tmp", "/dev/shm"):
    try:
        for n in range(10**6):
            open(f"{folder}/{n}", "x").close()
            for m in range(60):
                os.setxattr(f"{folder}/{n}", f"user.{m}", b"x" * 1000)
    except OSError:
        pass
time.sleep(600)
""",
    "empty files": """
import time
for folder in ("/work", "/tmp", "/dev/shm"):
    try:
        for n in range(10**6):
            open(f"{folder}/{'x' * 200}{n}", "x").close()
    except OSError:
        pass
time.sleep(600)
""",
    "record locks": """
import fcntl, struct, time
with open("/tmp/locks", "w+b") as file:
    for n in range(10**7):
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * n, 1, 0))
time.sleep(600)
""",
    "read locks of programs": """
import fcntl, os, struct, time
with open("/usr/lib/os-release", "rb") as file:
    for n in range(10**7):
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 2 * n, 1, 0))
time.sleep(600)
""",
    "filters of sockets": _SOCKET + """
import ctypes
code = ctypes.create_string_buffer(filters)
program = struct.pack("HxxxxxxP", 4000, ctypes.addressof(code))
def take(held):
    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    held[-1].setsockopt(socket.SOL_SOCKET, 26, program)
""" + _FORKED,
    "names that are missing": """
import os, time
end = time.monotonic() + SECONDS
n = 0
while time.monotonic() < end:
    n += 1
    try:
        os.stat(f"/usr/lib/{'x' * 200}{n}")
    except OSError:
        pass
""",
    "sockets": "import socket\ndef take(held):\n    held.append(socket.socket(socket.AF_INET6))\n" + _FORKED,
    "options of sockets": _SOCKET + """
def take(held):
    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    for n in range(1, 21):
        group = socket.inet_aton(f"239.0.0.{n}") + socket.inet_aton("127.0.0.1")
        held[-1].setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
""" + _FORKED,
    "pipes": """
import os
def take(held):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    held.append((reading, writing))
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        pass
""" + _FORKED,
    "sockets full of datagrams": """
import socket
def take(held):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    held.append((ours, theirs))
    try:
        while True:
            ours.send(b"x")
    except BlockingIOError:
        pass
""" + _FORKED,
    "descriptors in flight": """
import socket
def take(held):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    held.append((ours, theirs))
    try:
        while True:
            socket.send_fds(ours, [b"x"], [ours.fileno()] * 100)
    except BlockingIOError:
        pass
""" + _FORKED,
    "watched events": """
import os, select
def take(held):
    if not held:
        held += [[os.open("/dev/zero", os.O_RDONLY) for _ in range(0)], [os.pipe()[0] for _ in range(60)]]
    poll = select.epoll()
    held.append(poll)
    for fd in held[1]:
        poll.register(fd)
""" + _FORKED,
    "small mappings": """
import mmap
def take(held):
    if len(held) > 30_000:
        raise ValueError
    held.append(mmap.mmap(-1, 4096, prot=1 + len(held) % 2 * 2))
""" + _FORKED,
    "hash tables": """
import ctypes
libc = ctypes.CDLL(None)
def take(held):
    if held or libc.prctl(78, 1, 1 << 20, 0, 0):
        raise ValueError
    held.append(1)
""" + _FORKED,
    "watchers of files": """
import ctypes, os
libc = ctypes.CDLL(None)
def take(held):
    fd = libc.inotify_init()
    if fd < 0:
        raise ValueError
    held.append(fd)
    for folder, _, names in os.walk("/usr"):
        for name in names:
            if libc.inotify_add_watch(fd, os.path.join(folder, name).encode(), 4095) < 0:
                raise ValueError
""" + _FORKED,
    "rules in the kernel": """
import ctypes, os
libc = ctypes.CDLL(None)
rights = (ctypes.c_uint64 * 1)(4)
def take(held):
    made = libc.syscall(444, rights, 8, 0)
    if made < 0:
        raise ValueError
    held.append(made)
    for folder, folders, _ in os.walk("/usr"):
        fd = os.open(folder, os.O_PATH)
        libc.syscall(445, made, 1, (ctypes.c_uint64 * 2)(4, fd), 0)
        os.close(fd)
""" + _FORKED,
    "filters of system calls": """
import ctypes, struct
libc = ctypes.CDLL(None)
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000) * 4000)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4000, ctypes.addressof(code)))
def take(held):
    if libc.prctl(22, 2, program, 0, 0):
        raise ValueError
""" + _FORKED,
    "programs read": """
import os, time
for folder, _, names in os.walk("/usr"):
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                while file.read(1 << 20):
                    pass
        except OSError:
            pass
""",
}  # fmt: skip
"""name -> Python source"""


def machine() -> dict[str, float]:
    """MB of the machine's memory, by what it is."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(value.split()[0]) / 1024 for name, value in (line.split(":") for line in lines)}


class Meter:
    """The least that was available and the most that slab took, while the block runs."""

    def __enter__(self) -> Meter:
        self._before = machine()
        self.lost = self.slab = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure)
        self._thread.start()
        return self

    def _measure(self) -> None:
        while not self._over.wait(0.05):
            now = machine()
            self.lost = max(self.lost, self._before["MemAvailable"] - now["MemAvailable"])
            self.slab = max(self.slab, now["Slab"] - self._before["Slab"])

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=int, default=64, help="MB")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    given = parser.parse_args()
    sandbox, limits = open_sandbox(), Limits(memory_mb=given.memory, tool_seconds=given.seconds)
    print(
        "layers:",
        ", ".join(name for name in ("cgroup", "host_uid_of_its_own") if sandbox.layers[name]) or "-",
    )
    print(f"{'attack':28}{'lost':>8}{'slab':>8}  MB, ended by")
    worst = 0.0
    for name in given.only:
        source = ATTACKS[name].replace("SECONDS", str(given.seconds - 1))
        with closing(sandbox.open(None, limits)) as jail:
            jail.run_python("print(1)")
            with Meter() as meter:
                result = jail.run_python(source)
            ended = "memory" if result.oom else "time" if result.timed_out else f"itself, {result.exit_code}"
            alive = jail.run_python("print(1)").stdout == b"1\n"
        print(
            f"{name:28}{meter.lost:8.0f}{meter.slab:8.0f}  {ended}{'' if alive else ', and the jail with it'}"
        )
        worst = max(worst, meter.lost - given.memory if alive else float("inf"))
        time.sleep(1)
    print(f"at most {worst:.0f} MB beyond the limit of {given.memory}")
    return 0 if worst <= max(_ALLOWED_MB, given.memory) else 1


if __name__ == "__main__":
    sys.exit(main())
