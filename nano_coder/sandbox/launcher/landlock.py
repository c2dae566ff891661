"""Landlock, a second barrier for the file system: a read-only tree and a few writable folders.

Best effort: kernels differ in the rights that they know, so the rights are cut to the kernel's version.
"""

from __future__ import annotations

import functools
import os
import struct

from . import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_RIGHTS = {2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""version -> mask of all file rights that it knows: truncate came with 3, ioctl on devices with 5"""
_SCOPES = 3
"""mask of abstract UNIX sockets and signals, known since version 6"""
_FILES_WRITABLE = ("/dev", "/proc")
"""devices and a process's own settings: writing to existing files only"""


@functools.cache
def version() -> int:
    """The kernel's Landlock version; 0 if it has none, or version 1, which cannot rename across folders."""
    try:
        known = kernel.syscall(_CREATE, None, 0, _VERSION_FLAG)
    except OSError:
        return 0
    return known if known > 1 else 0


def confine(writable: tuple[str, ...]) -> None:
    """Restrict writing, for this process and its descendants, to `writable`. Raises OSError."""
    known = version()
    rights = max(mask for since, mask in _RIGHTS.items() if since <= known)
    attributes = struct.pack("=QQQ", rights, 0, _SCOPES if known >= 6 else 0)
    # an older kernel accepts the shorter struct only
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = kernel.syscall(_CREATE, attributes[:size], size, 0)
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    _allow(ruleset, "/", reading)
    for path in _FILES_WRITABLE:
        _allow(ruleset, path, (reading | _WRITE_FILE | _TRUNCATE | 1 << 15) & rights)
    for path in writable:
        _allow(ruleset, path, rights)
    kernel.syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, folder), 0)
    os.close(folder)
