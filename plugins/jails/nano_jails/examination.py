"""The doctor: runs escape attempts and abuse in a jail, and reports which of them got through."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox
from nano_jails.escape_attempts import ATTEMPTS
from nano_shared.files import scratch_folder
from nano_shared.types import Limits

_PROGRAM = Path(__file__).with_name("escape_attempts.py").read_text(encoding="utf-8")
_LIMITS = Limits(tool_seconds=5, memory_mb=128, output_bytes=4096)
_CANARY = "NANO_DOCTOR_CANARY"

_LAYERS = {name: layer for name, (_, layer) in ATTEMPTS.items()} | {
    "start_processes_without_end": "rlimits", "take_memory_without_end": "rlimits, memory watch",
    "fill_the_disk": "sized tmpfs, memory watch", "make_files_without_end": "inodes of tmpfs, memory watch",
    "lock_files_without_end": "memory watch", "fill_pipes_and_sockets": "memory watch, cgroup",
    "write_output_without_end": "output cap", "run_without_end": "deadline",
    "leave_a_process_behind": "pid namespace", "leave_a_file_behind": "empty /tmp",
}  # fmt: skip
"""attempt or abuse -> the layer that should stop it"""


_OF_A_FOLDER = (
    "see_folders_of_the_host_in_lists_of_mounts", "watch_files_without_end", "make_files_without_end",
)  # fmt: skip
# a container's programs are uid 0 of their own namespace, without any capability
_NOT_PROMISED = {"bwrap": _OF_A_FOLDER, "podman": (*_OF_A_FOLDER, "become_root")}
"""sandbox -> attempts that it does not stop, as its documentation says"""


@dataclass(frozen=True, slots=True)
class EscapeFinding:
    attempt: str
    layer: str
    """the layer that should stop it"""
    through: str | None
    """what was achieved; None if it was stopped"""

    @property
    def held(self) -> bool:
        return self.through is None


def examine(sandbox: Sandbox) -> list[EscapeFinding]:
    """Run every attempt, in a warm interpreter and in a fresh one. Raises SandboxError without a jail."""
    with host_bait() as outside, closing(sandbox.open(None, _LIMITS)) as jail:
        cold = _reported(jail.run([sandbox.python, "-I", "-c", _PROGRAM], stdin=json.dumps(outside).encode()))
        found = try_to_escape(jail, outside) | _abuses(jail)
    unknown = "the attempt did not report"
    return [
        EscapeFinding(
            name, layer, found.get(name, unknown) or (cold.get(name, unknown) if name in ATTEMPTS else None)
        )
        for name, layer in _LAYERS.items()
        if name not in _NOT_PROMISED.get(sandbox.name, ())
    ]


@contextmanager
def host_bait() -> Iterator[dict[str, str]]:
    """Resources of the host that no jail may reach: file, key in an environment, server, socket."""
    with ExitStack() as stack:
        canary = stack.enter_context(scratch_folder("canary")) / "canary"
        canary.write_bytes(b"secret")
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        name = f"nano-{secrets.token_hex(8)}"
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + name)
        abstract.listen()
        secret = secrets.token_hex(16)
        holder = stack.enter_context(subprocess.Popen(["sleep", "600"], env={**os.environ, _CANARY: secret}))
        stack.callback(holder.kill)
        yield {
            "file": str(canary), "secret": secret, "port": str(server.getsockname()[1]), "abstract": name,
            "host": socket.gethostname(),
        }  # fmt: skip


def try_to_escape(jail: Jail, outside: Mapping[str, str]) -> dict[str, str | None]:
    """Attempt -> None if it was stopped, else what it achieved; empty if the program did not run."""
    return _reported(jail.run_python(_PROGRAM, isolated=True, stdin=json.dumps(dict(outside)).encode()))


def _reported(result: ExecResult) -> dict[str, str | None]:
    if not result.ok:
        return {}
    found: dict[str, str | None] = json.loads(result.stdout)
    return found


_FORKS = """
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    pass
print(n)
"""
_FILES = """
n = 0
for folder in ("/dev/shm", "/tmp", "/work"):
    try:
        while n < 100_000:
            open(f"{folder}/{n}", "x").close()
            n += 1
    except OSError:
        pass
print(n)
"""
_LOCKS = """
import fcntl, struct
with open("/dev/shm/locks", "w+b") as file:
    for n in range(1_000_000):
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * n, 1, 0))
print("locked")
"""
_BUFFERS = """
import os, socket, time
for _ in range(30):
    if os.fork() == 0:
        held = []
        try:
            while True:
                ours, theirs = socket.socketpair()
                ours.setblocking(False)
                held.append((ours, theirs))
                try:
                    while True:
                        ours.send(b"x" * 65536)
                except BlockingIOError:
                    pass
        except OSError:
            time.sleep(60)
time.sleep(60)
"""


def _abuses(jail: Jail) -> dict[str, str | None]:
    forks = jail.run_python(_FORKS)
    memory = jail.run_python("x = []\nwhile True:\n    x.append(bytearray(1 << 24))")
    files = jail.run_python(_FILES)
    jail.run(["/bin/sh", "-c", "rm -rf /work/*"])
    locks, buffers = jail.run_python(_LOCKS), jail.run_python(_BUFFERS)
    disk = jail.run(
        ["/bin/sh", "-c", "for n in 1 2 3 4; do head -c 100M /dev/zero > /tmp/$n || exit 9; done"]
    )
    flood = jail.run(["/bin/sh", "-c", "exec cat /dev/zero"])
    endless = jail.run(["/bin/sh", "-c", "trap '' TERM INT; while :; do :; done"], timeout=0.1)
    jail.run(["/bin/sh", "-c", "setsid sleep 60 & echo x > /tmp/left"])
    left = jail.run(
        ["/bin/sh", "-c", "ls /tmp; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 6[0]'"]
    )
    count = int(forks.stdout or b"500")
    return {
        "start_processes_without_end": None if count < 500 else f"{count} processes",
        "take_memory_without_end": None if memory.oom or memory.exit_code == 1 else "no limit was met",
        "make_files_without_end": None
        if int(files.stdout or b"0") < 60_000
        else f"{int(files.stdout)} files",
        "lock_files_without_end": None if locks.oom else "no limit was met",
        "fill_pipes_and_sockets": None if buffers.oom else "no limit was met",
        "fill_the_disk": None if disk.exit_code == 9 or disk.oom else "no limit was met",
        "write_output_without_end": None if flood.truncated and not flood.ok else "no limit was met",
        "run_without_end": None if endless.timed_out else "it was not stopped",
        "leave_a_process_behind": "sleep" if b"sleep" in left.stdout else None,
        "leave_a_file_behind": "/tmp/left" if b"left" in left.stdout else None,
    }
