"""What isolation costs: one `print(1)` in every way there is, interleaved, as ratios to plain `python -c`.

    python benchmarks/sandbox.py [--rounds 100] [--seconds 6] [--nsjail PATH] [--image NAME] [--json]

bubblewrap and nsjail take part where they are found, on PATH or where --nsjail says; with --image also a
plain `podman run` and our sandbox podman, in that image. On demand: the launcher runs, the jail is new.
Warm: a jail of the pool, taken, used once and closed. 50 files: a folder of 50 files of 2 kB goes in, a
program runs, all files come back. Throughput: as many runs as fit, at 16 at a time.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.protocol import open_sandbox
from nano_containers.podman import find_podman
from nano_shared.types import Limits

SOURCE = "print(1)"
LIMITS = Limits()
CONCURRENT = 16
_TURNS = 3
FILES = 50
FILE_BYTES = 2000
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


def nsjail(program: str) -> tuple[str, ...]:
    return (program, "-q", "-Mo", "--chroot", "/", "--disable_rlimits", "--")


@dataclass(frozen=True, slots=True)
class Bar:
    """What one way may cost: at most this ratio to the median of another, or at least to its runs."""

    way: str
    against: str
    ratio: float
    throughput: bool = False


BARS = (
    Bar("warm", "python -c", 0.20),
    Bar("warm", "bubblewrap", 0.12),
    Bar("on demand", "python -c", 1.0),
    Bar("50 files", "python -c", 0.6),
    Bar("warm", "python -c", 1.15, throughput=True),
)


def podman_run(image: str) -> Callable[[], bytes]:
    argv = [
        *find_podman().command, "run", "--rm", "--pull=never", "--network=none", "--ulimit=nofile=1024:1024",
        "--ulimit=nproc=1024:1024", image, "python3", "-c", SOURCE,
    ]  # fmt: skip
    return lambda: subprocess.run(argv, capture_output=True, check=False).stdout


def in_containers(image: str | None) -> dict[str, Callable[[], bytes]]:
    """The ways of podman in an image that has Python."""
    if image is None:
        return {}
    sandbox = open_sandbox("podman", image=image)

    def container() -> bytes:
        with closing(sandbox.open(None, LIMITS)) as jail:
            return jail.run_python(SOURCE).stdout

    return {"podman run": podman_run(image), "podman": container}


def ways(sandbox: NsSandbox, files: Path, nsjail_program: str | None) -> dict[str, Callable[[], bytes]]:
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
            said = jail.run_python("import os; print(len(os.listdir()) // 50)").stdout
            back = jail.snapshot()
        return said if len(back) > FILES * FILE_BYTES else b"files are missing"

    found: dict[str, Callable[[], bytes]] = {"python -c": wrapped()}
    if shutil.which("bwrap"):
        found["bubblewrap"] = wrapped(*bubblewrap())
    if nsjail_program:
        found["nsjail"] = wrapped(*nsjail(nsjail_program))
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
    parser.add_argument("--nsjail", metavar="PATH", default=shutil.which("nsjail"), help="its executable")
    parser.add_argument("--image", metavar="NAME", help="container image with Python, for podman")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.nsjail is not None and not os.access(given.nsjail, os.X_OK):
        parser.error(f"no executable at {given.nsjail!r}; leave --nsjail out, or name nsjail's")
    sandbox = open_sandbox("ns")
    assert isinstance(sandbox, NsSandbox)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            (Path(folder) / f"file_{number}.py").write_bytes(b"x = 1\n" * (FILE_BYTES // 6) + b"#\n")
        found = ways(sandbox, Path(folder), given.nsjail) | in_containers(given.image)
        taken = latencies(found, given.rounds)
        rates = throughputs(found, given.seconds)
    rows = summary(taken, rates)
    met = [{**asdict(bar), "measured": value} for bar in BARS if (value := measured(bar, rows)) is not None]
    if given.json:
        print(json.dumps({"ways": rows, "bars": met}))
    else:
        show(rows, met)
    return 0


def throughputs(found: dict[str, Callable[[], bytes]], seconds: float) -> dict[str, float]:
    """Runs a second of some ways, the median of turns that take each other's place."""
    rates: dict[str, list[float]] = {
        name: [] for name in ("python -c", "warm", "bubblewrap") if name in found
    }
    for _ in range(_TURNS):
        for name, counted in rates.items():
            counted.append(throughput(found[name], seconds / _TURNS))
    return {name: statistics.median(counted) for name, counted in rates.items()}


def summary(taken: dict[str, list[float]], rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """Way -> its figures."""
    plain = statistics.median(taken["python -c"])
    rows = {}
    for name, ms in taken.items():
        middle = statistics.median(ms)
        rows[name] = {"p50_ms": middle, "p95_ms": sorted(ms)[int(0.95 * len(ms))], "ratio": middle / plain}
        if name in rates:
            rows[name]["runs_per_s"] = rates[name]
    return rows


def measured(bar: Bar, rows: dict[str, dict[str, float]]) -> float | None:
    """The ratio that the bar is about; None where one of the two was not measured."""
    figure = "runs_per_s" if bar.throughput else "p50_ms"
    one, other = rows.get(bar.way, {}).get(figure), rows.get(bar.against, {}).get(figure)
    return one / other if one and other else None


def show(rows: dict[str, dict[str, float]], met: list[dict[str, Any]]) -> None:
    print(f"{'way':12} {'p50 ms':>8} {'p95 ms':>8} {'ratio':>6} {'runs/s':>7}")
    for name, row in rows.items():
        rate = f"{row['runs_per_s']:7.0f}" if "runs_per_s" in row else ""
        print(f"{name:12} {row['p50_ms']:8.2f} {row['p95_ms']:8.2f} {row['ratio']:6.2f} {rate}")
    print()
    for bar in met:
        what = "runs/s" if bar["throughput"] else "p50"
        limit = f"{'at least' if bar['throughput'] else 'at most'} {bar['ratio']:g}"
        holds = (bar["measured"] >= bar["ratio"]) == bar["throughput"] or bar["measured"] == bar["ratio"]
        print(
            f"{bar['way']:10} of {bar['against']:10} {what:6} {bar['measured']:5.2f}  {limit:13} "
            f"{'met' if holds else 'MISSED'}"
        )


if __name__ == "__main__":
    sys.exit(main())
