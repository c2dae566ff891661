"""The control groups of a launcher: one around all its jails, and in it one for each jail's programs.

`own` holds the launcher and the jails' init processes, which a program's memory use must not kill. A program
enters its jail's group itself while it has a single thread: moving a whole process costs 10 ms in version 1.
A launcher removes its groups; leftovers of killed launchers are swept by the next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

PREFIX = "nano-jails-"
_OWN = "own"
_LIMITS = {
    "v1": {"memory": "memory.limit_in_bytes", "pids": "pids.max"},
    "v2": {"memory": "memory.max", "pids": "pids.max"},
}
_PROGRAMS = {
    "v1": ("tasks", "memory.limit_in_bytes", "memory.oom_control"),
    "v2": ("cgroup.procs", "memory.max", "memory.events"),
}
"""files to enter a group, to set its limit, and to count its kills"""
_NO_SWAP = {"v1": "memory.swappiness", "v2": "memory.swap.max"}
_BESIDE = 32 << 20
"""bytes of kernel memory for a program that the memory watch does not count"""
_NO_LIMIT = 1 << 60
_TRIES = 5
_PATIENCE_S = 2.0


class JailCgroup(NamedTuple):
    """Open files of the control group of one jail's programs; -1 where there is no group."""

    entrance: int = -1
    limit: int = -1
    events: int = -1

    def join(self) -> None:
        """Move this single-threaded process into the group, with no limit yet."""
        if self.entrance >= 0:
            # if the group was removed, the memory watch still bounds the program
            with contextlib.suppress(OSError):
                os.write(self.entrance, b"0")
            self._limit(_NO_LIMIT)

    def begin(self, memory_bytes: int) -> None:
        """Set the memory limit: beyond it the kernel kills one of the group's processes."""
        if self.limit >= 0:
            self._limit(memory_bytes + _BESIDE)

    def _limit(self, memory_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self.limit, str(memory_bytes).encode())


class ControlGroup:
    """The groups of one launcher, below one folder for each controller (v1), or below one folder (v2)."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """`plan`: `version`, `name`, `parents` (controller -> folder), `memory` in bytes, `pids`.

        Raises OSError if a folder does not exist.
        """
        self._plan = plan
        # kept open: after the root is exchanged, no path leads there
        self._parents = {folder: os.open(folder, os.O_PATH) for folder in set(plan["parents"].values())}

    def enter(self) -> None:
        """Create the groups, and move this process, with its future children, into `own`. Raises OSError."""
        sweep(self._parents)
        for left in reversed(range(_TRIES)):
            try:
                self._make()
                return
            except OSError as error:
                # another launcher swept the group while it was empty
                if not left or error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise

    def _make(self) -> None:
        version, name = self._plan["version"], self._plan["name"]
        for parent in self._parents:
            top = os.path.join(parent, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(top)
            if version == "v2":
                _write(f"{top}/cgroup.subtree_control", "+memory +pids")
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{top}/{_OWN}")
        for controller, file in _LIMITS[version].items():
            _write(os.path.join(self._plan["parents"][controller], name, file), str(self._plan[controller]))
        for parent in self._parents:
            _write(os.path.join(parent, name, _OWN, "cgroup.procs"), "0")

    def make_programs(self, number: int) -> JailCgroup:
        """Create the group of the jail with this number; the caller closes the files. Raises OSError."""
        version, parent = self._plan["version"], self._parents[self._plan["parents"]["memory"]]
        folder = f"{self._plan['name']}/{number}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=parent)
        with contextlib.suppress(OSError):  # fails where the kernel does not account for swap
            swap = os.open(f"{folder}/{_NO_SWAP[version]}", os.O_WRONLY, dir_fd=parent)
            os.write(swap, b"0")
            os.close(swap)
        entrance, limit, events = _PROGRAMS[version]
        return JailCgroup(
            os.open(f"{folder}/{entrance}", os.O_WRONLY, dir_fd=parent),
            os.open(f"{folder}/{limit}", os.O_WRONLY, dir_fd=parent),
            os.open(f"{folder}/{events}", os.O_RDONLY, dir_fd=parent),
        )

    def remove(self) -> None:
        """Remove the groups, once all their processes have ended, which may take a moment."""
        until = time.monotonic() + _PATIENCE_S
        for parent in self._parents.values():
            while not _removed(self._plan["name"], parent) and time.monotonic() < until:
                time.sleep(0.01)
            os.close(parent)


def kills(events: int) -> int:
    """Number of kills by the kernel in the group; `events` is its open file, or -1 without a group."""
    if events < 0:
        return 0
    for line in os.pread(events, 1024, 0).splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


def sweep(parents: Iterable[str]) -> None:
    """Remove groups of launchers that ended without removing them."""
    for parent in set(parents):
        for name in os.listdir(parent):
            if name.startswith(PREFIX):
                _removed(os.path.join(parent, name))


def _removed(name: str, parent: int | None = None) -> bool:
    """Whether a launcher's group is gone now. Pids are not used: they may belong to another namespace."""
    try:
        top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return True
    try:
        # `own` first: the kernel refuses while the launcher lives
        for inner in (
            _OWN,
            *(entry.name for entry in os.scandir(top) if entry.is_dir() and entry.name != _OWN),
        ):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(inner, dir_fd=top)
        os.rmdir(name, dir_fd=parent)
    except OSError:
        return False
    finally:
        os.close(top)
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
