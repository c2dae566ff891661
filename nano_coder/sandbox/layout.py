"""The root file system of a jail as a plan: which parts of the host it shows, and what it makes up."""

from __future__ import annotations

import os
import pwd
from typing import Any

from nano_coder.sandbox.interpreter import Interpreter
from nano_coder.sandbox.launcher import root, zygote

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
    """The plan as plain JSON for the launcher; it holds no name of the user, the machine or the workspace."""
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
    """Whether each jail can be a user of its own on the host, and take what the kernel gives each user."""
    with open("/proc/self/uid_map") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    reached = any(
        first <= zygote.UIDS.start and zygote.UIDS.stop <= first + count for first, _, count in extents
    )
    return os.geteuid() == 0 and reached
