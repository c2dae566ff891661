"""The log on SQLite and on Postgres, side by side: writers turn by turn, whole runs, a copy, and a reading.

    python benchmarks/store.py [--writers 16] [--runs 100] [--large 10000] [--url postgresql://...]

Without --url a Postgres server is started in a temporary folder from the installed package, which waits for
the disk as SQLite does. `--large` runs are copied from SQLite to Postgres, and their facts, which is what
`nano-rl admit` reads, are streamed from both; memory is that of the reading process beyond its start. Rates
are of the wall, and of CPU of the writers: on a busy machine only the second says something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "contract"))

WRITER = """
import json, sys, time
from log_values import a_run, a_turn
from nano_shared.store import LogStore
from nano_shared.types import StopReason, TurnTokens
address, name, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokens = TurnTokens(
    context_ids=tuple(range(200)), sampled_ids=tuple(range(100)), logprobs=tuple(-n / 7 for n in range(100))
)
turns = []
for index in range(3):
    completion = a_turn(index).completion.model_copy(update={"tokens": tokens})
    turns.append(a_turn(index).model_copy(update={"completion": completion}))
with LogStore.open(address) as store:
    store.append(a_run(f"{name}-first", turns=tuple(turns)))
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.process_time()
    for number in range(runs):
        store.begin(a_run(f"{name}-{number}"))
        for turn in turns:
            store.append_turn(f"{name}-{number}", turn)
        store.finish(f"{name}-{number}", stop=StopReason.FINISHED, ended=2.0)
    print(json.dumps(time.process_time() - begun))
"""
READER = """
import json, resource, sys, time
from nano_shared.store import LogStore
with LogStore.open(sys.argv[1], create=False) as store:
    facts = store.facts()
    next(facts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, turns = time.monotonic(), sum(len(run.turns) for run in facts)
    seconds = time.monotonic() - started
print(json.dumps([turns / seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]))
"""


def process(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def turn_by_turn(address: str, writers: int, runs: int) -> tuple[float, float]:
    """Turns a second on the wall and of CPU, of processes that write three turns a run."""
    processes = [process(WRITER, address, f"w{number}", str(runs)) for number in range(writers)]
    for one in processes:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    started = time.monotonic()
    for one in processes:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    cpu = sum(json.loads(one.communicate()[0]) for one in processes)
    turns = writers * runs * 3
    return turns / (time.monotonic() - started), turns / cpu


def fill(address: str, runs: int) -> float:
    """Whole runs in one transaction, as `log import` adds them. Returns turns a second."""
    from log_values import a_run, a_turn, a_verdict

    from nano_shared.logged_run import LoggedRun
    from nano_shared.store import LogStore
    from nano_shared.types import StopReason

    turns = tuple(a_turn(index) for index in range(3))

    def made() -> Iterator[LoggedRun]:
        for number in range(runs):
            run = a_run(f"large-{number:09}", turns=turns, stop=StopReason.FINISHED, started=float(number))
            yield LoggedRun(trajectory=run, verdicts=(a_verdict(float(number % 2)),))

    with LogStore.open(address) as store:
        started = time.monotonic()
        store.merge(made)
        return runs * 3 / (time.monotonic() - started)


def copied(source: str, target: str) -> float:
    """Turns a second of `nano-coder log migrate`."""
    from nano_cluster.log_copy import Copied, copy_into
    from nano_shared.store import LogStore

    done = Copied()
    with LogStore.open(source) as old, LogStore.open(target) as new:
        started = time.monotonic()
        copy_into(new, old, done)
        return done.turns / (time.monotonic() - started)


def lost(address: str, writers: int, runs: int) -> int:
    from nano_shared.store import LogStore

    with LogStore.open(address) as store:
        return writers * (runs + 1) * 3 - sum(len(run.turns) for run in store.facts())


@contextmanager
def databases(url: str | None, folder: Path) -> Iterator[dict[str, list[str]]]:
    """Three addresses of empty logs for each database; Postgres is left out where there is none."""
    from postgres_server import missing, running_server

    found = {"SQLite": [str(folder / f"{number}.db") for number in range(3)]}
    if url is not None:
        yield found | {"Postgres": [url] * 3}
    elif reason := missing():
        print(f"no Postgres: {reason}")
        yield found
    else:
        with running_server("fsync=on", "max_connections=300") as server:
            yield found | {
                "Postgres": [f"{server.new_database()}&blobs={folder / 'blobs'}" for _ in range(3)]
            }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--writers", type=int, default=16)
    asked.add_argument("--runs", type=int, default=100, help="of each writer")
    asked.add_argument("--large", type=int, default=10_000, help="runs that are imported, copied and read")
    asked.add_argument("--url", help="an empty database of a server that runs already")
    given = asked.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="nano-store-") as name:
        with databases(given.url, Path(name)) as found:
            measure(found, given.writers, given.runs, given.large)


def measure(found: dict[str, list[str]], writers: int, runs: int, large: int) -> None:
    for name, (written, imported, _) in found.items():
        wall, cpu = turn_by_turn(written, writers, runs)
        missing = lost(written, writers, runs)
        told = f"{wall:7.0f} turns/s, {cpu:.0f} per CPU s, {missing} lost"
        print(f"{name:<9} {writers} writers, turn by turn: {told}")
        print(f"{name:<9} whole runs, one writer:   {fill(imported, large):7.0f} turns/s")
    if "Postgres" in found:
        source, target = found["SQLite"][1], found["Postgres"][2]
        print(f"SQLite to Postgres, log migrate:    {copied(source, target):7.0f} turns/s")
    for name, (_, imported, _) in found.items():
        rate, growth = json.loads(process(READER, imported).communicate()[0])
        print(f"{name:<9} facts of {large} runs:     {rate:7.0f} turns/s, {growth:.0f} MB more")


if __name__ == "__main__":
    main()
