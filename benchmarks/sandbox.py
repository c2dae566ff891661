"""What isolation costs: one `print(1)` in every way there is, interleaved, as ratios to plain `python -c`.

    python benchmarks/sandbox.py [--rounds 100] [--seconds 6] [--json]

bubblewrap and nsjail take part where they are found on PATH. On demand: the launcher runs, the jail is new.
Warm: a jail of the pool, taken, used once and closed. Throughput: as many runs as fit, at 16 at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from nano_coder.sandbox import open_sandbox
from nano_coder.sandbox.ns import NsSandbox
from nano_shared.types import Limits

SOURCE = "print(1)"
LIMITS = Limits()
CONCURRENT = 16
_PAUSE_S = 0.06
"""between runs, so that the pool is full again when the next one comes"""


def wrapped(*wrapper: str) -> Callable[[], bytes]:
    argv = [*wrapper, sys.executable, "-c", SOURCE]
    return lambda: subprocess.run(argv, capture_output=True, check=False, env={"PATH": os.defpath}).stdout


def bubblewrap() -> tuple[str, ...]:
    return (
        "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--ro-bind", "/", "/",
        "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv",
    )  # fmt: skip


def nsjail() -> tuple[str, ...]:
    return ("nsjail", "-q", "-Mo", "--chroot", "/", "--disable_rlimits", "--")


def ways(sandbox: NsSandbox, files: Path) -> dict[str, Callable[[], bytes]]:
    def warm() -> bytes:
        with closing(sandbox.open(None, LIMITS)) as jail:
            return jail.run_python(SOURCE).stdout

    def on_demand() -> bytes:
        with closing(sandbox.open_new(None, LIMITS)) as jail:
            return jail.run_python(SOURCE).stdout

    def shell() -> bytes:
        with closing(sandbox.open(None, LIMITS)) as jail:
            return jail.run(["/bin/sh", "-c", "echo 1"]).stdout

    def workspace() -> bytes:
        with closing(sandbox.open(files, LIMITS)) as jail:
            return jail.run_python("import os; print(len(os.listdir()) // 50)").stdout

    found: dict[str, Callable[[], bytes]] = {"python -c": wrapped()}
    if shutil.which("bwrap"):
        found["bubblewrap"] = wrapped(*bubblewrap())
    if shutil.which("nsjail"):
        found["nsjail"] = wrapped(*nsjail())
    return found | {
        "warm": warm, "on demand": on_demand, "warm shell": shell, "50 files": workspace,
    }  # fmt: skip


def latencies(found: dict[str, Callable[[], bytes]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each way, one of each a round."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, way in found.items():
            time.sleep(_PAUSE_S)
            started = time.perf_counter()
            out = way()
            taken[name].append((time.perf_counter() - started) * 1e3)
            if out != b"1\n":
                raise SystemExit(f"{name} answered {out!r}; is it allowed here?")
    return taken


def throughput(way: Callable[[], bytes], seconds: float) -> float:
    """Runs a second with CONCURRENT at a time."""
    until, done = time.perf_counter() + seconds, 0

    def work() -> int:
        count = 0
        while time.perf_counter() < until:
            way()
            count += 1
        return count

    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENT) as pool:
        done = sum(pool.map(lambda _: work(), range(CONCURRENT)))
    return done / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each throughput measurement")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sandbox = open_sandbox("ns")
    assert isinstance(sandbox, NsSandbox)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(50):
            (Path(folder) / f"file_{number}.py").write_text("x = 1\n" * 333)
        found = ways(sandbox, Path(folder))
        taken = latencies(found, given.rounds)
        rates: dict[str, list[float]] = {"python -c": [], "warm": [], "bubblewrap": []}
        for _ in range(3):
            for name in rates:
                if name in found:
                    rates[name].append(throughput(found[name], given.seconds / 3))
    plain = statistics.median(taken["python -c"])
    rows = [
        {
            "way": name, "p50_ms": statistics.median(ms), "p95_ms": sorted(ms)[int(0.95 * len(ms))],
            "ratio": statistics.median(ms) / plain,
            "runs_per_s": statistics.median(rates[name]) if rates.get(name) else None,
        }
        for name, ms in taken.items()
    ]  # fmt: skip
    if given.json:
        print(json.dumps(rows))
        return 0
    print(f"{'way':12} {'p50 ms':>8} {'p95 ms':>8} {'ratio':>6} {'runs/s':>7}")
    for row in rows:
        rate = f"{row['runs_per_s']:7.0f}" if row["runs_per_s"] else ""
        print(f"{row['way']:12} {row['p50_ms']:8.2f} {row['p95_ms']:8.2f} {row['ratio']:6.2f} {rate}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
