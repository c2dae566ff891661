"""One control group for all jails of a launcher: what they take together is bounded.

A group for each jail was measured: moving a process costs 10 ms. The launcher makes the group, its child
enters it before it makes jails, and the launcher removes it; what a killed one left is swept by the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from typing import Any

PREFIX = "nano-jails-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)")
_LIMITS = {
    "v1": {"memory": "memory.limit_in_bytes", "pids": "pids.max"},
    "v2": {"memory": "memory.max", "pids": "pids.max"},
}
_EVENTS = {"v1": "memory.oom_control", "v2": "memory.events"}
_PATIENCE_S = 2.0


class Group:
    """The folders of one group: one a controller (v1), or one for both (v2)."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """Make it as planned: `version`, `parents` (controller -> folder), `memory` in bytes, `pids`.

        Raises OSError, and leaves nothing, where the system refuses.
        """
        sweep(plan["parents"].values())
        # held open: once the root is exchanged, no path leads there
        self._parents = {parent: os.open(parent, os.O_PATH) for parent in set(plan["parents"].values())}
        self._name = name = f"{PREFIX}{os.getpid()}-{started(os.getpid())}"
        self.folders = {controller: os.path.join(at, name) for controller, at in plan["parents"].items()}
        try:
            for folder in dict.fromkeys(self.folders.values()):
                os.mkdir(folder)
            for controller, file in _LIMITS[plan["version"]].items():
                _write(os.path.join(self.folders[controller], file), str(plan[controller]))
            self.events = os.open(
                os.path.join(self.folders["memory"], _EVENTS[plan["version"]]), os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            self.remove()
            raise

    def enter(self) -> None:
        """Put this process, and all that it starts from now on, into the group."""
        for folder in dict.fromkeys(self.folders.values()):
            _write(os.path.join(folder, "cgroup.procs"), "0")

    def remove(self) -> None:
        """Once every process of it has ended; the last of them may take a moment."""
        until = time.monotonic() + _PATIENCE_S
        for parent in self._parents.values():
            while not _removed(self._name, parent) and time.monotonic() < until:
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


def remove_of(pid: int, parents: Iterable[str]) -> None:
    """Remove the group of a launcher that was killed, once the last of its jails has ended."""
    until = time.monotonic() + _PATIENCE_S
    for parent in set(parents):
        for name in (name for name in os.listdir(parent) if name.startswith(f"{PREFIX}{pid}-")):
            while not _removed(os.path.join(parent, name)) and time.monotonic() < until:
                time.sleep(0.01)


def sweep(parents: Iterable[str]) -> None:
    """Remove the groups of launchers that have ended without doing so."""
    for parent in set(parents):
        for name in os.listdir(parent):
            match = _NAME.fullmatch(name)
            if match and started(int(match[1])) != int(match[2]):
                _removed(os.path.join(parent, name))


def started(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; 0 for none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def _removed(name: str, parent: int | None = None) -> bool:
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=parent)
    except OSError:
        return False
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
