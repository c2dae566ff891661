"""The root plan: which parts of the host a jail's root file system shows, and which files are made up."""

from __future__ import annotations

import os
import platform
import pwd
from typing import Any

from nano_coder.sandbox.interpreter import Interpreter
from nano_coder.sandbox.launcher import landlock, root, seccomp, zygote
from nano_shared.types import Limits

FILE_MB = 256
"""largest file, MB"""
PROCESSES = 64
"""processes and threads of a program, where its limits name no number"""
_MB = 1 << 20


def always(limits: Limits) -> dict[str, int]:
    """Rlimits that are the same for every request and do not hinder trusted code: set before one comes."""
    return {
        "RLIMIT_NOFILE": 256,
        "RLIMIT_NPROC": limits.processes or PROCESSES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }


def rlimits(limits: Limits) -> dict[str, int]:
    """Resource name -> soft and hard limit."""
    return {**of_request(limits), **always(limits)}


def of_request(limits: Limits) -> dict[str, int]:
    """The rlimits that depend on the request."""
    return {"RLIMIT_AS": limits.memory_mb * _MB, "RLIMIT_FSIZE": FILE_MB * _MB}


_ALWAYS = (
    "empty_environment", "host_uid_not_root", "user_namespace", "mount_namespace", "pid_namespace",
    "network_namespace", "ipc_namespace", "uts_namespace", "cgroup_namespace", "read_only_root",
    "capabilities", "no_new_privs",
)  # fmt: skip


def layers(**others: bool) -> dict[str, bool]:
    """Layer -> whether it is on; `others` are the backend's own."""
    return {
        **dict.fromkeys(_ALWAYS, True),
        "seccomp": seccomp.program(platform.machine()) is not None,
        "rlimits": True,
        "memory_watchdog": True,
        "landlock": landlock.version() > 0,
        "cgroup": False,
        **others,
    }


_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SHARED = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/mime.types",
)
_MADE_UP = (
    ("/etc/passwd", "root:x:0:0:root:/:/usr/sbin/nologin\nuser:x:1000:1000:user:/tmp:/bin/sh\n"),
    ("/etc/group", "root:x:0:\nuser:x:1000:\n"),
    ("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ("/etc/hostname", "sandbox\n"),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ("/etc/resolv.conf", ""),
)


def plan_root(interpreter: Interpreter) -> dict[str, Any]:
    """The plan as plain JSON for the launcher; contains no name of the user, the machine or the workspace."""
    links = list(interpreter.links)
    binds = [("/usr", "/usr"), *interpreter.binds]
    for name in _MERGED:
        path = f"/{name}"
        if os.path.islink(path):
            links.append((os.readlink(path), path))
        elif os.path.isdir(path):
            binds.append((path, path))
    binds.append((os.path.dirname(root.__file__), f"{root.LAUNCHER_INSIDE}/launcher"))
    for path in _SHARED:
        if os.path.exists(path):
            binds.append((os.path.realpath(path), path))
    files = [(path, text, 0o644) for path, text in _MADE_UP] + list(interpreter.shims)
    return {"binds": binds, "links": links, "files": files}


def unused_uid(wanted: int = 65533) -> int:
    """A uid that no account of this machine has."""
    taken = {account.pw_uid for account in pwd.getpwall()}
    while wanted in taken:
        wanted -= 1
    return wanted


def own_uids() -> bool:
    """Whether each jail can run as a user of its own on the host, with that user's kernel limits for
    itself."""
    with open("/proc/self/uid_map") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    reached = any(
        first <= zygote.UIDS.start and zygote.UIDS.stop <= first + count for first, _, count in extents
    )
    return os.geteuid() == 0 and reached
