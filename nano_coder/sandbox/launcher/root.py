"""The root file system that jails see: a small tmpfs with read-only views of the host's programs."""

from __future__ import annotations

import os
from typing import Any

from . import kernel

_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
LAUNCHER_INSIDE = "/opt/nano"


def build(plan: dict[str, Any]) -> None:
    """Mount the planned root, make it `/`, and leave the host's root behind.

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
        # while the host's /proc is still visible: the kernel asks for that
        kernel.mount("proc", "/new/proc", "proc", _QUIET | kernel.MS_NOEXEC)
    with kernel.layer("pivot_root"):
        _enter()


def _populate(plan: dict[str, Any]) -> None:
    os.umask(0o022)
    for name in ("proc", "tmp", "work", "dev/shm"):
        os.makedirs(f"/new/{name}")
    for target, path in plan["links"]:
        _parent(path)
        os.symlink(target, f"/new{path}")
    for path, text, mode in plan["files"]:
        _parent(path)
        with open(f"/new{path}", "w") as file:
            file.write(text)
        os.chmod(f"/new{path}", mode)
    for source, target in plan["binds"]:
        _bind(source, target, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"/dev/{name}", kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"/new/dev/{name}")


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
