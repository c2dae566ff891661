"""What an import may need beside the rows themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    repo: Path | None = None
    """swe-bench: the local git repository, or a folder that holds them as owner__name"""
