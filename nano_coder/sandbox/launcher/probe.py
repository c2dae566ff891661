"""The self-test's escapes: what a confined process tries, and what became of each attempt."""

from __future__ import annotations

import os
import socket


def attempts(secret: str) -> dict[str, bool]:
    """Layer -> whether it held. `secret` is a file of the host that must not be readable."""
    return {
        "network_namespace": not _connects(),
        "mount_namespace": not _reads(secret),
        "read_only_root": not any(_writes(folder) for folder in ("/", "/usr", "/etc", "/dev", "/proc/sys")),
        # none but those that were started before us, from pid 1 on
        "pid_namespace": _processes() == list(range(1, os.getpid() + 1)),
        "user_namespace": os.getuid() == 1000 and not _reads("/proc/1/environ"),
        "capabilities": _status("CapEff") == _status("CapBnd") == "0" * 16,
        "no_new_privs": _status("NoNewPrivs") == "1",
    }


def _connects() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            # a datagram socket connects wherever there is a route; nothing is sent
            handle.connect(("192.0.2.1", 9))
        except OSError:
            return False
    return True


def _processes() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _reads(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(1) != b""
    except OSError:
        return False


def _writes(folder: str) -> bool:
    try:
        os.mkdir(os.path.join(folder, "nano-probe"))
    except OSError:
        return False
    return True


def _status(name: str) -> str:
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{name}:"))
