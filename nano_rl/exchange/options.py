"""What an import may need beside the rows themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nano_shared.blobs import BlobStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    repo: Path | None = None
    """swe-bench: the local git repository, or a folder that holds them as owner__name"""
    blobs: BlobStore | None = None
    """where a starting workspace goes that `files` cannot hold: binaries, links, executables"""
