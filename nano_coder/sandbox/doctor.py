"""Proves what a sandbox holds on this machine: tries to escape, abuses it, and names what got through."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nano_coder.sandbox.protocol import Jail, Sandbox
from nano_shared.scratch import scratch_folder
from nano_shared.types import Limits

_PROGRAM = Path(__file__).with_name("escapes.py").read_text(encoding="utf-8")
_LIMITS = Limits(tool_seconds=5, memory_mb=128, output_bytes=4096)
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
    "start_processes_without_end": "rlimits",
    "take_memory_without_end": "rlimits, memory watch",
    "fill_the_disk": "sized tmpfs, memory watch",
    "write_output_without_end": "output cap",
    "run_without_end": "deadline",
    "leave_a_process_behind": "pid namespace",
    "leave_a_file_behind": "empty /tmp",
}


@dataclass(frozen=True, slots=True)
class Finding:
    attempt: str
    layer: str
    """what is to stop it"""
    through: str | None
    """what was achieved; None where it held"""

    @property
    def held(self) -> bool:
        return self.through is None


def examine(sandbox: Sandbox) -> list[Finding]:
    """Every attempt and what became of it. Raises SandboxError where no jail can be had."""
    with host_bait() as outside, closing(sandbox.open(None, _LIMITS)) as jail:
        found = try_to_escape(jail, outside) | _abuses(jail)
    return [
        Finding(name, layer, found.get(name, "the attempt did not report")) for name, layer in _LAYERS.items()
    ]


@contextmanager
def host_bait() -> Iterator[dict[str, str]]:
    """Things of the host that a jail must not reach: a file, a key, a server, a socket."""
    with ExitStack() as stack:
        canary = stack.enter_context(scratch_folder("canary")) / "canary"
        canary.write_bytes(b"secret")
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        name = f"nano-{secrets.token_hex(8)}"
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + name)
        abstract.listen()
        os.environ[_CANARY] = secrets.token_hex(16)
        stack.callback(os.environ.pop, _CANARY)
        yield {
            "file": str(canary),
            "secret": os.environ[_CANARY],
            "port": str(server.getsockname()[1]),
            "abstract": name,
            "host": socket.gethostname(),
        }


def try_to_escape(jail: Jail, outside: Mapping[str, str]) -> dict[str, str | None]:
    """Attempt -> None where it was stopped, else what it achieved; empty where the program did not run."""
    result = jail.run_python(_PROGRAM, [json.dumps(dict(outside))], isolated=True)
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
_LEFT = """
import os
print(os.listdir("/tmp"), sum(name.isdigit() for name in os.listdir("/proc")))
"""


def _abuses(jail: Jail) -> dict[str, str | None]:
    forks = jail.run_python(_FORKS)
    memory = jail.run_python("x = []\nwhile True:\n    x.append(bytearray(1 << 24))")
    disk = jail.run(
        ["/bin/sh", "-c", "for n in 1 2 3 4; do head -c 100M /dev/zero > /tmp/$n || exit 9; done"]
    )
    flood = jail.run(["/bin/sh", "-c", "exec cat /dev/zero"])
    endless = jail.run(["/bin/sh", "-c", "trap '' TERM INT; while :; do :; done"], timeout=0.1)
    jail.run(["/bin/sh", "-c", "setsid sleep 60 & echo x > /tmp/left"])
    left = jail.run_python(
        "import os\nprint(os.listdir('/tmp'), sum(p.isdigit() for p in os.listdir('/proc')))"
    )
    count = int(forks.stdout or b"500")
    return {
        "start_processes_without_end": None if count < 500 else f"{count} processes",
        "take_memory_without_end": None if memory.oom or memory.exit_code == 1 else "no limit was met",
        "fill_the_disk": None if disk.exit_code == 9 or disk.oom else "no limit was met",
        "write_output_without_end": None if flood.truncated and not flood.ok else "no limit was met",
        "run_without_end": None if endless.timed_out else "it was not stopped",
        "leave_a_process_behind": None if left.stdout.endswith(b" 2\n") else left.stdout.decode(),
        "leave_a_file_behind": None if left.stdout.startswith(b"[]") else left.stdout.decode(),
    }
