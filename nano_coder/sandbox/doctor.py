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

from nano_coder.sandbox.escape_attempts import ATTEMPTS
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox
from nano_shared.scratch import scratch_folder
from nano_shared.types import Limits

_PROGRAM = Path(__file__).with_name("escape_attempts.py").read_text(encoding="utf-8")
_LIMITS = Limits(tool_seconds=5, memory_mb=128, output_bytes=4096)
_TRIED = frozenset(attempt.__name__ for attempt in ATTEMPTS)
_CANARY = "NANO_DOCTOR_CANARY"

_LAYERS = {
    "read_a_file_of_the_host": "mount namespace",
    "read_keys_in_an_environment": "empty environment",
    "read_the_memory_of_init": "seccomp, not dumpable",
    "see_processes_of_the_host": "pid namespace",
    "kill_init": "pid namespace",
    "write_outside_the_workspace": "read-only root",
    "change_a_kernel_setting": "read-only /proc/sys",
    "reach_the_network": "network namespace",
    "reach_a_server_of_the_host": "network namespace",
    "reach_an_abstract_socket_of_the_host": "network namespace",
    "open_a_socket_that_no_namespace_confines": "seccomp",
    "make_a_user_namespace": "seccomp",
    "mount_a_file_system": "seccomp",
    "join_another_namespace": "seccomp",
    "become_root": "user namespace",
    "hold_a_capability": "capabilities",
    "call_what_exploits_begin_with": "seccomp",
    "hold_memory_that_nobody_counts": "seccomp",
    "type_into_the_terminal": "seccomp, own session",
    "make_a_device": "user namespace",
    "learn_the_name_of_the_host": "uts namespace",
    "see_folders_of_the_host_in_lists_of_mounts": "second mount namespace",
    "inherit_an_open_file": "closed descriptors",
    "reach_a_service_of_the_host": "mount namespace",
    "open_a_device_of_the_host": "mount namespace",
    "read_the_log_of_the_kernel": "seccomp",
    "change_the_clock": "seccomp",
    "change_the_name_of_the_machine": "capabilities",
    "change_a_network_device": "capabilities",
    "run_before_others": "capabilities",
    "join_other_groups": "capabilities",
    "move_its_root": "seccomp",
    "limit_init": "seccomp",
    "raise_its_own_limits": "rlimits",
    "be_traced": "seccomp",
    "call_what_is_younger_than_the_filter": "seccomp",
    "call_as_another_machine": "seccomp",
    "filter_system_calls_itself": "seccomp",
    "keep_rules_in_the_kernel": "seccomp",
    "keep_extended_attributes": "seccomp",
    "take_slots_of_asynchronous_io": "seccomp",
    "take_huge_pages": "seccomp",
    "take_hash_tables": "seccomp",
    "take_flow_labels": "seccomp",
    "attach_filters_to_sockets": "seccomp",
    "open_sockets_whose_buffers_nobody_counts": "seccomp",
    "enlarge_a_pipe": "seccomp",
    "lock_in_the_name_of_nobody": "seccomp",
    "wait_for_the_disks_of_the_host": "seccomp",
    "watch_files_without_end": "user namespace",
    "keep_descriptors_in_flight": "rlimits",
    "use_descriptors_without_end": "rlimits",
    "start_processes_without_end": "rlimits",
    "take_memory_without_end": "rlimits, memory watch",
    "fill_the_disk": "sized tmpfs, memory watch",
    "make_files_without_end": "inodes of tmpfs, memory watch",
    "lock_files_without_end": "memory watch",
    "fill_pipes_and_sockets": "memory watch, cgroup",
    "write_output_without_end": "output cap",
    "run_without_end": "deadline",
    "leave_a_process_behind": "pid namespace",
    "leave_a_file_behind": "empty /tmp",
}


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
    """Run every attempt, in a warm jail's interpreter and in one that is started in the jail.

    Raises SandboxError if no jail can be opened.
    """
    with host_bait() as outside, closing(sandbox.open(None, _LIMITS)) as jail:
        cold = _reported(jail.run([sandbox.python, "-I", "-c", _PROGRAM], stdin=json.dumps(outside).encode()))
        found = try_to_escape(jail, outside) | _abuses(jail)
    unknown = "the attempt did not report"
    return [
        EscapeFinding(
            name, layer, found.get(name, unknown) or (cold.get(name, unknown) if name in _TRIED else None)
        )
        for name, layer in _LAYERS.items()
        if name not in _NOT_PROMISED.get(sandbox.name, ())
    ]


@contextmanager
def host_bait() -> Iterator[dict[str, str]]:
    """Resources of the host that a jail must not reach: a file, a key in an environment, a server, a
    socket."""
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
            "file": str(canary),
            "secret": secret,
            "port": str(server.getsockname()[1]),
            "abstract": name,
            "host": socket.gethostname(),
        }


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
