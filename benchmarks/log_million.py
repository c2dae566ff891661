"""`nano-rl admit` over a million turns in Postgres: seconds and memory, against a tenth of them.

    python benchmarks/log_million.py [--turns 1000000] [--url postgresql://...]

A thousand runs of log_scale.py (3 turns each, some 300 tokens) are written, and copied within the server
under other tasks and ids. Without --url the server is one of this script's, in a temporary folder, which does
not wait for the disk: reading is what is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from log_scale import admitted, bar, fill, pool

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "contract"))

from postgres_server import running_server  # noqa: E402

from nano_shared import schema  # noqa: E402
from nano_shared.store import LogStore  # noqa: E402

SEED_RUNS, TURNS = 1000, 3
GROWTH_MB = 32.0
COPIED = {
    schema.tasks: ("id", "key"), schema.runs: ("id", "task_id"), schema.turns: ("run_id",),
    schema.tool_calls: ("run_id",), schema.verdicts: ("run_id",),
}  # fmt: skip
"""table -> the columns that a copy numbers"""


def enlarge(engine: sa.Engine, first: int, last: int) -> None:
    """Add copies `first` to `last` of the runs that were written."""
    with engine.begin() as connection:
        for table, numbered in COPIED.items():
            names = [c.name for c in table.columns if not (table is schema.verdicts and c.name == "id")]
            chosen = ", ".join(f"{name} || '-' || n" if name in numbered else f'"{name}"' for name in names)
            columns = ", ".join(f'"{name}"' for name in names)
            of = numbered[0]
            connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({columns}) SELECT {chosen} FROM {table.name},"
                f" generate_series({first}, {last}) n WHERE position('-copy-' in {of}) = 0".replace(
                    "'-' || n", "'-copy-' || n"
                )
            )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def measure(url: str, folder: Path, turns: int) -> bool:
    runs, copies = pool(folder), turns // (SEED_RUNS * TURNS)
    seed, held = folder / "seed.db", []
    fill(seed, runs, SEED_RUNS)
    with LogStore.open(seed) as source, LogStore.open(url) as target:
        from nano_cluster.log_copy import Copied, copy_into

        copy_into(target, source, Copied())
        engine: Any = target.database.engine
        peaks = []
        for first, last in ((1, copies // 10 - 1), (copies // 10, copies - 1)):
            began = time.monotonic()
            enlarge(engine, first, last)
            made = (last + 1) * SEED_RUNS
            print(
                f"{TURNS * made} turns in {time.monotonic() - began:.0f} s by INSERT ... SELECT", flush=True
            )
            for name, model in (("columns alone", None), ("with a tiny model", folder / "model")):
                seconds, cpu, peak, report = admitted(url, model)  # type: ignore[arg-type]
                peaks.append(peak)
                told = f"{seconds:.0f} s, CPU {cpu:.0f} s, {peak:.0f} MB"
                held.append(
                    bar(f"admit, {TURNS * made} turns, {name}", told, report["runs"] == made, "all runs")
                )
    for name, small, large in zip(("columns alone", "with a tiny model"), peaks, peaks[2:], strict=False):
        grown = large - small
        held.append(
            bar(f"  memory, {name}", f"{grown:+.0f} MB", grown < GROWTH_MB, f"under {GROWTH_MB:.0f} MB more")
        )
    return all(held)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--turns", type=int, default=1_000_000)
    asked.add_argument("--url", help="an empty database of a server that runs already")
    given = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="log-million-"))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    try:
        with nullcontext() if given.url else running_server("max_wal_size=4GB") as server:
            url = given.url or f"{server.new_database()}&blobs={folder / 'blobs'}"  # type: ignore[union-attr]
            return 0 if measure(url, folder, given.turns) else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
