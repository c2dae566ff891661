"""A blob store that lives as long as the process: for work whose bytes need no place in a log."""

from __future__ import annotations

import os
from pathlib import Path

from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError
from nano_shared.hashing import content_hash


class MemoryBlobs(BlobStore):
    """Holds every blob in memory; nothing is written to a disk."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))
        self._held: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        blob = content_hash(data)
        self._held[blob] = data
        return blob

    def get(self, blob: str) -> bytes:
        try:
            return self._held[blob]
        except KeyError:
            raise LogError(f"blob {blob} is not among those in memory") from None

    def __contains__(self, blob: str) -> bool:
        return blob in self._held
