"""A claim on a run: one process at a time executes it, and the kernel lets go when that process dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nano_shared.errors import LogError
from nano_shared.hashing import content_hash


@contextmanager
def claim(folder: Path, run_id: str) -> Iterator[None]:
    """Hold the run's lock file in `folder`. Holds among the processes that share that folder.

    Raises LogError, at once, when another holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Ids of imported runs can be any text: hash them into a file name.
    stem = content_hash(run_id).removeprefix("sha256:")[:24]
    owner = folder / f"{stem}.pid"
    lock = FileLock(folder / f"{stem}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise LogError(
            f"run {run_id} is being executed by another process (pid {_pid(owner)}); "
            "wait for it, or end that process"
        ) from None
    try:
        owner.write_text(str(os.getpid()))
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _pid(owner: Path) -> str:
    try:
        return owner.read_text() or "unknown"
    except FileNotFoundError:
        return "unknown"
