"""The control groups of a launcher: one around all its jails, and in it one for the programs of each jail.

`own` holds the launcher and each jail's init, which no program's greed may end. A program enters the group of
its jail by itself, as the only thread that it is yet: to move a whole process costs 10 ms in version 1. The
launcher removes its groups; what a killed one left is swept by the next.
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
"""to enter the group of a jail's programs, its limit, and where its kills are counted"""
_NO_SWAP = {"v1": "memory.swappiness", "v2": "memory.swap.max"}
_BESIDE = 32 << 20
"""bytes for what the kernel keeps of a program, which the memory watch does not count"""
_NO_LIMIT = 1 << 60
_TRIES = 5
_PATIENCE_S = 2.0


class Programs(NamedTuple):
    """The group of one jail's programs, as open files; below zero where there is none."""

    entrance: int = -1
    limit: int = -1
    events: int = -1

    def join(self) -> None:
        """Put this process, of one thread, into it; nothing is limited until a program begins."""
        if self.entrance >= 0:
            # somebody may have removed it: the memory watch is there still
            with contextlib.suppress(OSError):
                os.write(self.entrance, b"0")
            self._limit(_NO_LIMIT)

    def begin(self, memory_bytes: int) -> None:
        """From now on they may hold so much together: beyond it the kernel ends one of them."""
        if self.limit >= 0:
            self._limit(memory_bytes + _BESIDE)

    def _limit(self, memory_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self.limit, str(memory_bytes).encode())


class Group:
    """The groups of one launcher, below one folder a controller (v1), or one for both (v2)."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """As planned: `version`, `name`, `parents` (controller -> folder), `memory` in bytes, `pids`.

        Raises OSError where a folder is not there.
        """
        self._plan = plan
        # held open: once the root is exchanged, no path leads there
        self._parents = {folder: os.open(folder, os.O_PATH) for folder in set(plan["parents"].values())}

    def enter(self) -> None:
        """Make them, and put this process and all that it starts from now on into `own`. Raises OSError."""
        sweep(self._parents)
        for left in reversed(range(_TRIES)):
            try:
                self._make()
                return
            except OSError as error:
                # another launcher swept it before anybody was in it
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

    def make_programs(self, number: int) -> Programs:
        """The group of the jail with this number; the caller closes the files. Raises OSError."""
        version, parent = self._plan["version"], self._parents[self._plan["parents"]["memory"]]
        folder = f"{self._plan['name']}/{number}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=parent)
        with contextlib.suppress(OSError):  # where the kernel does not account for swap
            swap = os.open(f"{folder}/{_NO_SWAP[version]}", os.O_WRONLY, dir_fd=parent)
            os.write(swap, b"0")
            os.close(swap)
        entrance, limit, events = _PROGRAMS[version]
        return Programs(
            os.open(f"{folder}/{entrance}", os.O_WRONLY, dir_fd=parent),
            os.open(f"{folder}/{limit}", os.O_WRONLY, dir_fd=parent),
            os.open(f"{folder}/{events}", os.O_RDONLY, dir_fd=parent),
        )

    def remove(self) -> None:
        """Once every process of it has ended; the last of them may take a moment."""
        until = time.monotonic() + _PATIENCE_S
        for parent in self._parents.values():
            while not _removed(self._plan["name"], parent) and time.monotonic() < until:
                time.sleep(0.01)
            os.close(parent)


def kills(events: int) -> int:
    """How often the kernel has killed in the group; `events` is its open file, or below zero for none."""
    if events < 0:
        return 0
    for line in os.pread(events, 1024, 0).splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


def sweep(parents: Iterable[str]) -> None:
    """Remove the groups of launchers that have ended without doing so."""
    for parent in set(parents):
        for name in os.listdir(parent):
            if name.startswith(PREFIX):
                _removed(os.path.join(parent, name))


def _removed(name: str, parent: int | None = None) -> bool:
    """Whether a launcher's group is gone now. No process number is asked: it may be of another namespace."""
    try:
        top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return True
    try:
        # first, and refused as long as the launcher lives
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
