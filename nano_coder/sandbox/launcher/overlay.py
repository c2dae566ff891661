"""A workspace as an overlay: what it began with, read-only, below what the jail changes, in memory."""

from __future__ import annotations

import os

from . import kernel

BASES = "/opt/nano/bases"
"""where the root of a launcher for overlays shows them; every jail covers it"""
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
_TEST = "user.nano"


def lay(base: str) -> None:
    """Mount it over /work, whose own file system takes the changes. Raises OSError."""
    for name in ("/work/upper", "/work/work"):
        os.mkdir(name, 0o755)
    # without them the kernel mounts, and cannot replace a directory
    os.setxattr("/work/upper", _TEST, b"1")
    os.removexattr("/work/upper", _TEST)
    parts = f"lowerdir={BASES}/{base}/tree,upperdir=/work/upper,workdir=/work/work,userxattr"
    kernel.mount("overlay", "/work", "overlay", _QUIET, parts)
    # the bases of other jails
    kernel.mount("tmpfs", BASES, "tmpfs", _QUIET | kernel.MS_RDONLY, "size=4k,mode=555")
