"""`nano-rl cluster`: the workers of running trainings."""

from __future__ import annotations

import json
import time
from typing import Annotated

from typer import Argument

from nano_cluster.worker_status import WORKERS, ClusterStatus, read_status
from nano_rl.command_setup import trainings_dir
from nano_shared.command_line import JsonOption, lazy_app
from nano_shared.errors import UsageError
from nano_shared.printable import printable

command = lazy_app(
    "nano-rl.cluster",
    {"status": (f"{__name__}:status", "Workers of running trainings: alive, lost, queued, version, idle.")},
    help="The Ray workers of running trainings.",
)


def status(
    name: Annotated[str | None, Argument(metavar="NAME", help="Of one training.")] = None,
    as_json: JsonOption = False,
) -> int:
    """What the workers of `nano-rl train --ray` do now; it is written every two seconds."""
    folders = [trainings_dir() / name] if name else sorted(trainings_dir().glob(f"*/{WORKERS}"))
    folders = folders if name else [file.parent for file in folders]
    found = {folder.name: now for folder in folders if (now := read_status(folder))}
    if name and not found:
        others = "nano-rl cluster status lists those that have"
        raise UsageError(f"training {name} has no Ray workers now; {others}")
    if as_json:
        rows = {name: now.model_dump() | {"stale": now.is_stale} for name, now in found.items()}
        print(json.dumps(rows))
        return 0
    for training, now in found.items():
        print(printable(_text(training, now)))
    if not found:
        print("no training has Ray workers now")
    return 0


def _text(training: str, now: ClusterStatus) -> str:
    alive = sum(worker.opened for worker in now.workers)
    running = sum(worker.running for worker in now.workers)
    lines = [
        f"{training}: {alive} of {len(now.workers)} workers on Ray {now.cluster}, {now.replaced} replaced;"
        f" {now.queued} runs queued, {running} running, {now.done} done, {now.repeated} given to a second"
        f" worker; version {now.version}"
    ]
    if now.is_stale:
        ago = time.time() - now.written
        lines.append(f"  written {ago:.0f} s ago: process {now.trainer} has ended, or hangs")
    for worker in now.workers:
        state = "starts" if not worker.opened else "ready" if worker.current else "changes its version"
        lines.append(
            f"  worker {worker.number:<4} {worker.host or '-':<20} pid {worker.pid:<8} {state:<8}"
            f" {worker.running} running, {worker.done} done, {worker.idle:.0%} idle,"
            f" {worker.memory_mb:.0f} MB"
        )
    lines += [f"  lost: worker {lost.number} on {lost.host or '-'}: {lost.why}" for lost in now.lost[-10:]]
    return "\n".join(lines)
