"""CPU seconds (user and system) of the commands that shall be light, whole processes, interleaved with a bare
Python: medians, against the bar of 0.4 s.

    python benchmarks/command_line.py [--log FILE] [--runs 5]

The log is one of a hosted run, or FILE, such as the one that `log_scale.py --keep` leaves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Sampling, StopReason, Task, Trajectory, Turn

BAR = 0.4
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


def cpu_seconds(command: str, environment: dict[str, str]) -> float:
    if completes := command.endswith(" (completion)"):
        asked = {"_NANO_CODER_COMPLETE": "complete_bash", "COMP_WORDS": "nano-coder lo", "COMP_CWORD": "1"}
        environment = environment | asked
    program, *arguments = command.split()[: 1 if completes else None]
    child = subprocess.Popen(
        [Path(sys.executable).parent / program, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    error = child.stderr.read() if child.stderr else b""
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{command}: {error.decode()}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = given.log or hosted_log(Path(folder) / "log.db")
        environment = os.environ | {"NANO_HOME": folder, "NANO_LOG": str(log.resolve())}
        times: dict[str, list[float]] = {command: [] for command in COMMANDS}
        for _ in range(given.runs + 1):
            for command, seconds in times.items():
                if not (given.log and "hosted-1" in command):
                    seconds.append(cpu_seconds(command, environment))
    for command, (_, *seconds) in ((name, values) for name, values in times.items() if values):
        median = statistics.median(seconds)
        told = f"{median:.2f} s CPU (min {min(seconds):.2f}, max {max(seconds):.2f})"
        print(f"{command:30} {told:40} {'holds' if median <= BAR else f'MISSED {BAR} s'}")


if __name__ == "__main__":
    main()
