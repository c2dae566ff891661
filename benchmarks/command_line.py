"""How long `--help` takes: whole processes, interleaved with a bare Python, as medians and a ratio."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 11


def seconds(argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    folder = Path(sys.executable).parent
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "nano-coder --help": [str(folder / "nano-coder"), "--help"],
        "nano-rl --help": [str(folder / "nano-rl"), "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, argv in commands.items():
            times[name].append(seconds(argv))
    base = statistics.median(times["python -c pass"])
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"{name:20} {median:.3f} s (min {min(values):.3f}, max {max(values):.3f}; {median / base:.1f}x)"
        )


if __name__ == "__main__":
    main()
