"""Seconds of CPU (user and system) and on the wall of the commands that shall be light, whole processes,
interleaved with a bare Python: medians, against the bar of 0.4 s.

    python benchmarks/command_line.py [--log FILE] [--runs 5] [--write]

--write leaves them in docs/results/light.json. The log is one of a hosted run, or FILE, such as the one that
`log_scale.py --keep` leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Sampling, StopReason, Task, Trajectory, Turn

BAR = 0.4
RESULT = Path(__file__).parents[1] / "docs" / "results" / "light.json"
COMMANDS = (
    "python -c pass",
    "nano-coder --help",
    "nano-rl --help",
    "nano-coder log list",
    "nano-coder log show hosted-1",
    "nano-coder log stats",
    "nano-rl admit",
    "nano-coder (completion)",
)


def hosted_log(path: Path) -> Path:
    """A log of one run of a hosted model, which has no tokens."""
    said = Completion(text="Done.", finish=Finish.STOP, sampling=Sampling(), policy_id="openai:m")
    names = dict.fromkeys(("profile", "profile_hash", "template_hash", "tools_hash", "runtime_version"), "-")
    run = Trajectory(
        id="hosted-1", task=Task(key="t", prompt="Do it."), policy="openai:m", directory="/shop",
        turns=(Turn(index=0, completion=said, parser="api", started=0, ended=1),),
        stop=StopReason.FINISHED, started=0, ended=1, **names,
    )  # fmt: skip
    with LogStore.open(path) as store:
        store.append(run)
    return path


def seconds_of(command: str, environment: dict[str, str]) -> tuple[float, float]:
    """Of CPU, and on the wall."""
    if completes := command.endswith(" (completion)"):
        asked = {"_NANO_CODER_COMPLETE": "complete_bash", "COMP_WORDS": "nano-coder lo", "COMP_CWORD": "1"}
        environment = environment | asked
    program, *arguments = command.split()[: 1 if completes else None]
    started = time.monotonic()
    child = subprocess.Popen(
        [Path(sys.executable).parent / program, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    error = child.stderr.read() if child.stderr else b""
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{command}: {error.decode()}")
    return used.ru_utime + used.ru_stime, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = given.log or hosted_log(Path(folder) / "log.db")
        environment = os.environ | {"NANO_HOME": folder, "NANO_LOG": str(log.resolve())}
        times: dict[str, list[tuple[float, float]]] = {command: [] for command in COMMANDS}
        for _ in range(given.runs + 1):
            for command, found in times.items():
                if not (given.log and "hosted-1" in command):
                    found.append(seconds_of(command, environment))
    rows = []
    for command, (_, *found) in ((name, values) for name, values in times.items() if values):
        cpu, wall = zip(*found, strict=True)
        median = statistics.median(cpu)
        told = f"{median:.2f} s CPU (min {min(cpu):.2f}, max {max(cpu):.2f}), {statistics.median(wall):.2f} s"
        print(f"{command:30} {told:50} {'holds' if median <= BAR else f'MISSED {BAR} s'}")
        rows.append({
            "command": command, "cpu_s": round(median, 2), "wall_s": round(statistics.median(wall), 2),
            "least_cpu_s": round(min(cpu), 2),
        })  # fmt: skip
    if given.write:
        machine = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}"
        kept = {"command": "python benchmarks/command_line.py --write", "machine": machine, "bar": BAR}
        RESULT.write_text(json.dumps({**kept, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
