"""A jail's root file system: a small tmpfs with read-only binds of the host."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import files, kernel

_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
TERMINALS = "/dev/pts"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
}
LAUNCHER_INSIDE = "/opt/nano"
_READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV


def build(plan: dict[str, Any]) -> None:
    """Mount the planned root, make it `/`, and detach the host's root.

    Runs in a mount namespace of its own, as pid 1 of a pid namespace of its own.
    """
    with kernel.layer("mount_namespace"):
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", "/tmp", "tmpfs", _QUIET, "size=16m,mode=755")
        os.mkdir("/tmp/old")
        os.mkdir("/tmp/new")
        kernel.pivot_root("/tmp", "/tmp/old")
        os.chdir("/")
        kernel.mount("tmpfs", "/new", "tmpfs", _QUIET, "size=16m,mode=755")
    with kernel.layer("root"):
        _populate(plan)
    with kernel.layer("proc"):
        # while the host's /proc is still visible, as the kernel requires
        kernel.mount("proc", "/new/proc", "proc", _QUIET | kernel.MS_NOEXEC)
    with kernel.layer("pivot_root"):
        _enter()


def _populate(plan: dict[str, Any]) -> None:
    os.umask(0o022)
    for name in ("/proc", "/tmp", "/work", "/dev/shm", TERMINALS, files.STATE):
        os.makedirs(f"/new{name}")
    for target, path in plan["links"]:
        _parent(path)
        os.symlink(target, f"/new{path}")
    for path, text, mode in plan["files"]:
        _write(path, text, mode)
    for source, target in plan["binds"]:
        _bind(source, target, _READ_ONLY)
    for number, (text, target) in enumerate(plan["covers"]):
        source = f"{LAUNCHER_INSIDE}/covers/{number}"
        _write(source, text, 0o644)
        kernel.mount(f"/new{source}", f"/new{target}", None, kernel.MS_BIND)
        kernel.set_mount_attributes(f"/new{target}", _READ_ONLY)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"/dev/{name}", kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/new/dev/{name}")


def _write(path: str, text: str, mode: int) -> None:
    _parent(path)
    with open(f"/new{path}", "w", errors="surrogateescape") as file:
        file.write(text)
    os.chmod(f"/new{path}", mode)


def _parent(path: str) -> None:
    os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)


def _bind(source: str, target: str, attributes: int) -> None:
    source, target = f"/old{source}", f"/new{target}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    # recursive: an ordinary user may not separate a mount from the mounts below it
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.set_mount_attributes(target, attributes)


def _enter() -> None:
    kernel.detach("/old")
    os.chdir("/new")
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _QUIET)


def share_workspace() -> None:
    """Divide the file system at /work, whose size bounds both, into the workspace and our state."""
    for name, place in (("state", files.STATE), ("tree", "/work")):
        os.mkdir(f"/work/{name}", 0o755)
        kernel.mount(f"/work/{name}", place, None, kernel.MS_BIND)


STAGE = "/tmp"


def staged(index: int) -> str:
    """The path at which a program finds the source with this index."""
    return f"{STAGE}/{index}"


def become_user(owner: int, sources: Sequence[str], argv: list[str]) -> NoReturn:
    """As root: exec `argv` as `owner`, with `sources`, which only root may reach, mounted below STAGE.

    A usual source is an interpreter below /root. On failure the last line of stderr is the error.
    """
    try:
        _stage(sources)
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
        os.execve(argv[0], argv, {})
    except OSError as error:
        sys.exit(f"cannot show root's folders to uid {owner}: {error}")


def _stage(sources: Sequence[str]) -> None:
    kernel.unshare(kernel.NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # opened before STAGE hides what lies below it
    opened = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source in sources]
    kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for index, fd in enumerate(opened):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.mkdir(staged(index))
        else:
            os.close(os.open(staged(index), os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{fd}", staged(index), None, kernel.MS_BIND | kernel.MS_REC)
