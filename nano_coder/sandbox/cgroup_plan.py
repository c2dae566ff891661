"""Where on this host a control group for jails can be created, and its limits."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

_CONTROLLERS = ("memory", "pids")
_SHARE = 0.75
"""share of the memory of the machine, or of the enclosing group, that all jails may use together"""
_PROCESSES = 20_000


@lru_cache(maxsize=1)
def plan() -> dict[str, Any] | None:
    """The plan from which a launcher creates its control group; None where it cannot, as is usual without
    root."""
    return find(Path("/proc/self"), Path("/sys/fs/cgroup"))


def find(process: Path, mounts: Path) -> dict[str, Any] | None:
    """As `plan`, for the given `/proc/self` and cgroup mount point."""
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
