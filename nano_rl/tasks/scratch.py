"""Where checks run: a sandbox, and a log that is thrown away.

A check makes thousands of short runs whose log nobody reads, so the log lies in memory where there is room;
and the tests that an oracle runs are those of a task, so plugins of whatever else is installed stay out.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from nano_coder.runtime import COMPACT_1, Runtime, ScriptedPolicy, open_sandbox
from nano_rl.imitation.oracle import ORACLE
from nano_rl.plugins_off import PluginsOff
from nano_shared.blobs import BlobStore
from nano_shared.scratch import in_memory, scratch_folder
from nano_shared.store import LogStore


def log_folder() -> AbstractContextManager[Path]:
    """A folder for logs, removed in the end; in memory where there is room."""
    return scratch_folder("check", in_memory())


def scratch_runtime(folder: Path, blobs: Path | None = None) -> Runtime:
    """A runtime with a log of its own under `folder`; `blobs` are a log's, for tasks that start from it."""
    log = tempfile.mkdtemp(prefix=f"check-{os.getpid()}-", dir=folder)
    store = LogStore.open(Path(log) / "log.db")
    if blobs is not None:
        store.blobs = _Borrowed(store.blobs.root, BlobStore(blobs))
    return Runtime(
        policy=ScriptedPolicy([]),
        sandbox=PluginsOff(open_sandbox()),
        store=store,
        profile=COMPACT_1,
        policy_name=ORACLE,
    )


class _Borrowed(BlobStore):
    """Blobs of its own, and those of a log to read."""

    def __init__(self, root: Path, log: BlobStore) -> None:
        super().__init__(root)
        self._log = log

    def get(self, blob: str) -> bytes:
        return super().get(blob) if super().__contains__(blob) else self._log.get(blob)

    def __contains__(self, blob: str) -> bool:
        return super().__contains__(blob) or blob in self._log
