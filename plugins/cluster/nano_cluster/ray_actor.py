"""One rollout worker as the trainer sees it: an actor, what it was asked, what it answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nano_cluster.ray_worker import RolloutExecutor, RolloutJob, WorkerBeat, WorkerSetup
from nano_cluster.worker_status import LostWorker, WorkerStatus

RUNS_AT_ONCE = 4
"""jobs of one worker: agents wait for servers and tools most of the time"""
_GROUPS = {"runs": RUNS_AT_ONCE, "control": 2}
"""threads of an actor"""
POLL_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class QueuedJob:
    job: RolloutJob
    future: Future[str]
    """of the run's id"""
    lost: list[str] = field(default_factory=list)
    """how the workers ended that had it"""


@dataclass(slots=True, eq=False)
class RolloutWorker:
    number: int
    actor: Any
    host: str = ""
    pid: int = 0
    opened: bool = False
    asked: dict[Any, QueuedJob | str] = field(default_factory=dict)
    """object reference of an answer -> the job, or the method"""
    heard: float = field(default_factory=time.monotonic)
    """when it answered last, or was made"""
    beat: WorkerBeat | None = None
    beaten: float = 0.0
    """when it gave that"""
    adopting: int = 0
    """number of the announcement that it was told last"""
    adopted: int = 0
    """and of that which it follows"""
    in_use: frozenset[str] = frozenset()
    """older adapters that its requests used when it adopted the newest"""
    began: float = field(default_factory=time.monotonic)
    busy: float = 0.0
    """seconds with a job"""
    done: int = 0

    @classmethod
    def place(cls, number: int, setup: WorkerSetup, cpus: int) -> RolloutWorker:
        """An actor somewhere in the cluster, which is opening what it needs."""
        import ray

        actor = ray.remote(concurrency_groups=_GROUPS)(RolloutExecutor).options(
            num_cpus=cpus, scheduling_strategy="SPREAD", max_restarts=0
        )
        worker = cls(number, actor.remote())
        worker.ask("open", setup)
        return worker

    @property
    def jobs(self) -> list[QueuedJob]:
        return [one for one in self.asked.values() if isinstance(one, QueuedJob)]

    @property
    def where(self) -> str:
        place = f" on {self.host} (pid {self.pid})" if self.host else ""
        return f"rollout worker {self.number}{place}"

    @property
    def idle(self) -> float:
        """Share of its time without a job."""
        return max(0.0, 1 - self.busy / max(1e-9, time.monotonic() - self.began))

    def ask(self, method: str, *arguments: Any, job: QueuedJob | None = None) -> None:
        call = getattr(self.actor, method).options(concurrency_group="runs" if job else "control")
        self.asked[call.remote(*arguments)] = job or method

    def awaits(self, method: str) -> bool:
        return method in self.asked.values()

    def kill(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)

    def lost(self, why: str) -> LostWorker:
        return LostWorker(number=self.number, host=self.host, pid=self.pid, why=why)

    def status(self, announcement: int) -> WorkerStatus:
        return WorkerStatus(
            number=self.number, host=self.host, pid=self.pid, opened=self.opened, running=len(self.jobs),
            done=self.done, idle=self.idle, current=self.adopted == announcement,
            silent_seconds=time.monotonic() - self.heard, memory_mb=self.beat.memory_mb if self.beat else 0.0,
        )  # fmt: skip


def ready(workers: Sequence[RolloutWorker]) -> set[Any]:
    """References whose answers are there, after a short wait for the first."""
    import ray

    references = [reference for worker in workers for reference in worker.asked]
    if not references:
        time.sleep(POLL_SECONDS)
        return set()
    ray.wait(references, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
    return set(ray.wait(references, num_returns=len(references), timeout=0)[0])


def cause_of(error: Exception) -> str:
    """What Ray says of an actor's end, without its paragraphs of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("The actor is dead because")), lines[0])
    return told.partition(" Worker exit type")[0].partition(" Some common")[0][:200].rstrip(".")
