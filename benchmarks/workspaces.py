"""What a large workspace costs: opened, one program run and closed, streamed and as an overlay, interleaved.

    python benchmarks/workspaces.py [--rounds 10] [--files 50 400 2000 10000]

Files of 2 kB, a hundred to a folder. The base is built before the rounds; `first` is that first time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from nano_coder.sandbox import namespaces
from nano_coder.sandbox.namespaces import NsSandbox
from nano_shared.types import Limits

_SOURCE = "import os; print(sum(len(names) for _, _, names in os.walk('.')))"


def make(top: Path, count: int) -> Path:
    for number in range(count):
        folder = top / f"folder_{number // 100}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file_{number}.py").write_text("x = 1\n" * 333)
    return top


def milliseconds(sandbox: NsSandbox, workspace: Path, count: int) -> float:
    started = time.perf_counter()
    with closing(sandbox.open(workspace, Limits())) as jail:
        result = jail.run_python(_SOURCE)
    taken = (time.perf_counter() - started) * 1e3
    if result.stdout != f"{count}\n".encode():
        raise SystemExit(f"{count} files, and the jail answered {result}")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--files", type=int, nargs="+", default=[50, 400, 2000, 10_000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NANO_HOME"] = f"{folder}/home"
        overlaid, streamed = NsSandbox(), NsSandbox()
        streamed.layers = {**streamed.layers, "overlay_workspaces": False}
        # an overlay for the small ones too, to see where it begins to pay
        namespaces.OVERLAID_ENTRIES = 1
        print(f"{'files':>6} {'streamed ms':>12} {'overlay ms':>11} {'ratio':>6} {'first ms':>9}")
        for count in given.files:
            workspace = make(Path(folder, f"files_{count}"), count)
            first = milliseconds(overlaid, workspace, count)
            taken: dict[str, list[float]] = {"streamed": [], "overlay": []}
            for _ in range(given.rounds):
                taken["streamed"].append(milliseconds(streamed, workspace, count))
                taken["overlay"].append(milliseconds(overlaid, workspace, count))
            plain, over = (statistics.median(taken[way]) for way in ("streamed", "overlay"))
            print(f"{count:>6} {plain:12.1f} {over:11.1f} {over / plain:6.2f} {first:9.1f}")
        if not overlaid.layers["overlay_workspaces"]:
            raise SystemExit("no overlay can be mounted here: both columns were streamed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
