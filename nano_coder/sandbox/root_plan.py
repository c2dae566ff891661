"""What a jail gets of the host: its root file system, limits and control group; and the remedy without."""

from __future__ import annotations

import errno
import json
import os
import platform
import pwd
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from nano_coder.sandbox.interpreter import Interpreter
from nano_coder.sandbox.launcher import files, landlock, root, seccomp, zygote
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

FILE_MB = 256
"""largest file, MB"""
PROCESSES = 64
"""processes and threads of a program, where its limits name no number"""
_MB = 1 << 20


def always(limits: Limits) -> dict[str, int]:
    """Rlimits that are the same for every request and do not hinder trusted code: set before one comes.

    None bounds addresses: WebAssembly, the JVM, Go and sanitizers reserve far more than they use.
    """
    return {
        "RLIMIT_NOFILE": 256,
        "RLIMIT_NPROC": limits.processes or PROCESSES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }


def rlimits(limits: Limits) -> dict[str, int]:
    """Resource name -> soft and hard limit, for a workspace on a disk, where no file system bounds a file."""
    return {"RLIMIT_FSIZE": FILE_MB * _MB, **always(limits)}


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
    # git never lists or commits the links to our state and to an environment
    ("/etc/gitconfig", "[core]\n\texcludesFile = /etc/gitignore\n"),
    ("/etc/gitignore", f"/{files.OURS}\n.venv\nvenv\n"),
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
    texts = [(path, text, 0o644) for path, text in _MADE_UP] + list(interpreter.files)
    if interpreter.late:
        texts.append((files.LINKS, json.dumps(interpreter.late), 0o644))
    return {"binds": binds, "links": links, "files": texts, "covers": interpreter.covers}


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


_CONTROLLERS = ("memory", "pids")
_SHARE = 0.75
"""share of the memory of the machine, or of the enclosing group, that all jails may use together"""
_PROCESSES = 20_000


@lru_cache(maxsize=1)
def plan_cgroup() -> dict[str, Any] | None:
    """The plan from which a launcher creates its control group; None where it cannot, as is usual without
    root."""
    return find_cgroup(Path("/proc/self"), Path("/sys/fs/cgroup"))


def find_cgroup(process: Path, mounts: Path) -> dict[str, Any] | None:
    """As `plan_cgroup`, for the given `/proc/self` and cgroup mount point."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return None
    ours = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    found = _version_1(ours, mounts) or _version_2(ours.get("", "/"), mounts)
    if found is None:
        return None
    version, parents = found
    return {
        "version": version,
        "parents": {controller: str(parent) for controller, parent in parents.items()},
        "memory": int(_memory(parents["memory"], mounts) * _SHARE),
        "pids": _PROCESSES,
    }


def _version_1(ours: dict[str, str], mounts: Path) -> tuple[str, dict[str, Path]] | None:
    parents = {}
    for controller in _CONTROLLERS:
        path = next((path for names, path in ours.items() if controller in names.split(",")), None)
        # in a container the path may be that of the host, while the mount shows our subtree only
        places = [] if path is None else [mounts / controller / path.lstrip("/"), mounts / controller]
        parent = next((place for place in places if _writable(place)), None)
        if parent is None or not (parent / "cgroup.procs").exists():
            return None
        parents[controller] = parent
    return "v1", parents


def _version_2(path: str, mounts: Path) -> tuple[str, dict[str, Path]] | None:
    """The nearest enclosing group that is delegated to us and passes its controllers to its children.

    Usually not our own group: a group with processes cannot pass on controllers.
    """
    if not (mounts / "cgroup.controllers").exists():
        return None
    place = mounts / path.lstrip("/")
    while place.is_relative_to(mounts):
        try:
            handed_on = (place / "cgroup.subtree_control").read_text().split()
        except OSError:
            handed_on = []
        if set(_CONTROLLERS) <= set(handed_on) and _writable(place) and _writable(place / "cgroup.procs"):
            return "v2", dict.fromkeys(_CONTROLLERS, place)
        place = place.parent
    return None


def _writable(place: Path) -> bool:
    return os.access(place, os.W_OK)


def _memory(parent: Path, mounts: Path) -> int:
    """Memory of the machine, or the lowest limit of the groups around `parent`; bytes."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    while parent.is_relative_to(mounts):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                least = min(least, int((parent / name).read_text()))
            except (OSError, ValueError):  # "max", or no such file
                continue
        parent = parent.parent
    return least


_CONTAINER = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)


def read_setting(name: str) -> str | None:
    """A kernel setting by its dotted name; None if this kernel does not have it."""
    try:
        with open(os.path.join("/proc/sys", *name.split("."))) as file:
            return file.read().strip()
    except OSError:
        return None


def remedy(
    layer: str, error: int | None, *, is_root: bool, setting: Callable[[str], str | None] = read_setting
) -> str:
    """The command that makes `layer` work, chosen by the kernel's settings."""
    if setting("user.max_user_namespaces") == "0" or error in (errno.ENOSPC, errno.EUSERS):
        return "sudo sysctl -w user.max_user_namespaces=15000"
    if setting("kernel.unprivileged_userns_clone") == "0":
        return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if setting("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if error == errno.ENOSYS:
        return "sudo apt-get install linux-image-amd64  # Linux 5.12 or newer is needed"
    return f"{_CONTAINER} --cap-add SYS_ADMIN" if is_root else _CONTAINER


def cannot_isolate(layer: str, error: int | None, detail: str) -> SandboxError:
    """The SandboxError to raise where a layer fails: sandboxes never run programs unconfined instead."""
    command = remedy(layer, error, is_root=os.geteuid() == 0)
    return SandboxError(f"the sandbox cannot put up its layer {layer!r} ({detail}); to mend it: {command}")
