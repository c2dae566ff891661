"""The Ray cluster: one that runs, or one of this machine alone, on loopback, that ends with this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from nano_shared.errors import ConfigError, UsageError

AUTO = "auto"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # the raylet's remarks on killed workers would go to stdout
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOCAL = {
    "address": "local", "include_dashboard": False, "object_store_memory": 100 << 20,
    "_node_ip_address": "127.0.0.1",
}  # fmt: skip
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray listens on the address that it is given, and not on the machine's own"""
_WORKERS = {"RAY_worker_niceness": "0"}
"""15 is usual: on a machine that is busy such workers would not answer"""

_ANSWER_SECONDS = 10.0
"""for the head of a cluster to accept a connection"""


def connect(address: str) -> Callable[[], None]:
    """Connect this process to a cluster, or start one; returns what ends that. A connection that there is
    already is used as it is. Raises ConfigError without Ray, and UsageError for an address where no cluster
    answers."""
    named = (os.environ.get("RAY_ADDRESS") or AUTO) if address == AUTO else address
    set_variables(local=named.startswith((AUTO, "127.", "localhost")))
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'nano-rl-coder[cluster]'") from None
    if ray.is_initialized():
        return lambda: None
    if "://" in named:
        raise UsageError(
            f"--ray {named}: a client's address; give HOST:PORT of the cluster's head, on a machine that has"
            " joined it (ray start --address HOST:PORT)"
        )
    options: dict[str, Any] = {"address": named}
    if named == AUTO:
        options = _LOCAL
    try:
        if named != AUTO:  # Ray itself would try for two minutes
            host, _, port = named.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
        ray.init(**options, log_to_driver=False, logging_level="error")
    except (ConnectionError, OSError, RuntimeError, ValueError) as problem:
        why = str(problem).partition("\n")[0]
        raise UsageError(
            f"--ray {address}: no cluster of Ray {ray.__version__} answers at {named} ({why}); ray start"
            " --head starts one, --ray auto one of this machine alone"
        ) from None
    end: Callable[[], None] = ray.shutdown
    return end


def set_variables(*, local: bool) -> None:
    """Set those that Ray reads when it is imported, where the user has not: no statistics of use, and for a
    cluster of this machine alone no listening on its other addresses."""
    wanted = _QUIET | _WORKERS | (_LOOPBACK if local else {})
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})


def cluster_cpus() -> int:
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))
