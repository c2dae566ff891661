"""What import and export say at the end: the file on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nano_rl.exchange import Refusal


def report(target: Path, written: int, refusals: Sequence[Refusal], note: str = "") -> int:
    """Print the refusals, the counts and what was written; the exit code."""
    for refusal in refusals:
        print(f"refused: {refusal}", file=sys.stderr)
    counts = f"{written} tasks written" + (f", {note}" if note else "")
    print(counts + (f", {len(refusals)} refused" if refusals else ""), file=sys.stderr)
    if written:
        print(target)
    return 2 if refusals else 0
