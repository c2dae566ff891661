"""Why this machine cannot isolate, and the command that fixes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from nano_shared.errors import SandboxError

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
