"""Thousands of executions while jails, launchers and callers are killed at random: what is left behind?

    python benchmarks/sandbox_survival.py [--runs 20000] [--callers 40] [--seed 0]

Prints what was run, killed and refused, the memory of the caller early and late, and every process, mount,
cgroup, file and piece of shared memory that is there afterwards and was not before; exit code 1 if any.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_coder.sandbox.warm_pool import close_pools
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

_LIMITS = Limits(tool_seconds=20, memory_mb=256)
_CALLER = "import sys; from sandbox_survival import endless; endless(int(sys.argv[1]))"


def below(pid: int) -> list[int]:
    """Processes that descend from `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        here = children.get(pending.pop(), [])
        found += here
        pending += here
    return found


def leftovers() -> dict[str, set[str]]:
    """Everything of the machine that a sandbox could leave behind."""
    processes = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if "launcher" in (entry / "cmdline").read_text(errors="replace"):
                processes.add(f"{entry.name} {(entry / 'cmdline').read_text()[:60]!r}")
    return {
        "processes": processes,
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": {str(path) for path in Path("/sys/fs/cgroup").glob("*/nano*")},
        "files": {str(path) for path in Path(tempfile.gettempdir()).glob("nano-*")},
        "shared memory": set(os.listdir("/dev/shm")),
    }


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def one(sandbox: Sandbox, number: int) -> bool:
    """One execution, of a kind that depends on its number. False where the sandbox was killed under it."""
    try:
        with closing(sandbox.open(None, _LIMITS)) as jail:
            kind = number % 5
            if kind == 0:
                out = jail.run(
                    ["/bin/sh", "-c", "(sleep 60 &) ; head -c 100000 /dev/zero > /tmp/x; echo 1"]
                ).stdout
            elif kind == 1:
                jail.write("a/b", b"1\n")
                out = jail.run(["cat", "a/b"]).stdout
            elif kind == 2:
                out = jail.run_python("import os\nif os.fork(): print(1)").stdout
            else:
                out = jail.run_python("print(1)").stdout
    except SandboxError:
        return False
    if out not in (b"1\n", b""):
        raise SystemExit(f"execution {number} answered {out!r}")
    return True


def endless(seed: int) -> None:
    """The life of a caller that will be killed."""
    sandbox = open_sandbox()
    with ThreadPoolExecutor(4) as pool:
        while True:
            list(pool.map(lambda number: one(sandbox, number), range(seed, seed + 40)))


def kill_callers(count: int, rng: random.Random) -> None:
    for number in range(count):
        caller = subprocess.Popen([sys.executable, "-c", _CALLER, str(number)], cwd=Path(__file__).parent)
        time.sleep(rng.uniform(0.3, 1.5))
        caller.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
        caller.wait()


def kill_at_random(stop: threading.Event, rng: random.Random, killed: list[int]) -> None:
    """Jails, their inits, zygotes and supervisors: whatever is below this process."""
    while not stop.wait(rng.uniform(0.1, 0.6)):
        if victims := below(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed.append(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--callers", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    before = leftovers()
    kill_callers(given.callers, rng)
    sandbox, stop, killed = open_sandbox(), threading.Event(), list[int]()
    killer = threading.Thread(target=kill_at_random, args=(stop, rng, killed))
    killer.start()
    started, early, done = time.monotonic(), 0.0, 0
    with ThreadPoolExecutor(4) as pool:
        for chunk in range(0, given.runs, 200):
            done += sum(
                pool.map(lambda number: one(sandbox, number), range(chunk, min(chunk + 200, given.runs)))
            )
            early = early or (resident_mb() if chunk >= given.runs // 10 else 0.0)
    stop.set()
    killer.join()
    seconds = time.monotonic() - started
    print(f"{done} of {given.runs} executions in {seconds:.0f} s; {len(killed)} processes killed at random,")
    print(
        f"{given.callers} callers killed; resident memory {early:.1f} MB early, {resident_mb():.1f} MB late"
    )
    close_pools()
    time.sleep(1)
    after = leftovers()
    left = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}
    print(f"left behind: {left or 'nothing'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
