"""The layers of isolation that both backends put up here, for the execution log and `doctor`."""

from __future__ import annotations

import platform

from nano_coder.sandbox.launcher import landlock, seccomp

_ALWAYS = (
    "empty_environment", "host_uid_not_root", "user_namespace", "mount_namespace", "pid_namespace",
    "network_namespace", "ipc_namespace", "uts_namespace", "cgroup_namespace", "read_only_root",
    "capabilities", "no_new_privs",
)  # fmt: skip


def layers(**others: bool) -> dict[str, bool]:
    """Layer -> whether it is on; `others` are the backend's own."""
    return {
        **dict.fromkeys(_ALWAYS, True),
        "seccomp": seccomp.program(platform.machine()) is not None,
        "rlimits": True,
        "memory_watchdog": True,
        "landlock": landlock.version() > 0,
        "cgroup": False,
        **others,
    }
