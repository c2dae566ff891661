"""The distribution's bubblewrap: where it is, and the command line that shows a planned root to one program.

Everything bound writable is bound at a place of the root that bubblewrap has just made itself, so that no
symlink of a program lies on the way: what versions before 0.12 may follow is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from nano_coder.sandbox.launcher import root
from nano_shared.errors import SandboxError

SEARCHED = "/usr/bin:/usr/local/bin:/bin"
"""not the caller's PATH, which may lead into a stranger's repository"""
_OLDEST = (0, 7)
"""that bounds a tmpfs"""
_MB = 1 << 20
_TMP_MB, _SHM_MB = 256, 64
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")


def find_bubblewrap() -> str:
    """The program's path. Raises SandboxError with the remedy where it is missing or too old."""
    program = shutil.which("bwrap", path=SEARCHED)
    if program is None:
        raise SandboxError(
            "the sandbox 'bwrap' needs bubblewrap; install it: sudo apt-get install bubblewrap"
        )
    said = subprocess.run([program, "--version"], env={}, capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        raise SandboxError(
            f"{program} is {said.strip() or 'of no known version'}; the sandbox 'bwrap' needs 0.7 or newer: "
            "sudo apt-get install bubblewrap"
        )
    return program


def options(plan: dict[str, Any], work: str, hand_over: Callable[[bytes], int]) -> list[str]:
    """What puts up every layer. `hand_over` makes bytes a file descriptor that bubblewrap inherits."""
    given = [f"--unshare-{name}" for name in _NAMESPACES]
    given += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    given += ["--die-with-parent", "--new-session", "--clearenv"]
    for target, path in plan["links"]:
        given += ["--symlink", target, path]
    for path, text, mode in plan["files"]:
        given += ["--perms", f"{mode:04o}", "--file", str(hand_over(text.encode())), path]
    for source, target in plan["binds"]:
        given += ["--ro-bind", source, target]
    given += ["--perms", "0755", "--dir", "/dev"]
    for name in root.DEVICES:
        given += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in root.DEVICE_LINKS.items():
        given += ["--symlink", target, f"/dev/{name}"]
    given += ["--proc", "/proc"]
    for path, megabytes in (("/tmp", _TMP_MB), ("/dev/shm", _SHM_MB)):
        given += ["--perms", "1777", "--size", str(megabytes * _MB), "--tmpfs", path]
    # last, so that every place above could still be made
    return [*given, "--bind", work, "/work", "--remount-ro", "/", "--chdir", "/work"]


def encode(arguments: list[str]) -> bytes:
    """As --args reads them."""
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
