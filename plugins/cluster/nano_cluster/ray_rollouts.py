"""Rollouts by Ray actors: jobs in a queue, workers that are watched and replaced, runs in the one log.

    collect -> queue -> supervisor (a thread) -> up to RUNS_AT_ONCE jobs of each worker -> run ids -> the log

A worker whose actor died, or that was silent for too long, is killed and replaced; its jobs go to the front
of the queue, and whoever gets one goes on with what the log holds of it (`ray_worker`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_cluster.engine_pool import EngineState, PublishedAdapter
from nano_cluster.ray_actor import RUNS_AT_ONCE, QueuedJob, RolloutWorker, cause_of, ready
from nano_cluster.ray_cluster import cluster_cpus, connect
from nano_cluster.ray_worker import Redo, RolloutJob, WorkerBeat, WorkerFacts, WorkerFailure, WorkerSetup
from nano_cluster.worker_status import ClusterStatus, LostWorker
from nano_coder.run.execution import Runtime
from nano_rl.gather.rollouts import OnRun, member_seed, members
from nano_rl.rewards import Reward
from nano_shared.errors import NanoError, RolloutsFailed
from nano_shared.store import new_run_id
from nano_shared.types import Task, Trajectory

RETRIES = 5
"""workers that one job may lose; one more, and it is given up"""
START_SECONDS = 300.0
"""for a worker to be placed, to import torch and to open the log"""
START_FAILURES = 4
"""workers in a row that may end before they are open; with that many the rollouts fail"""
_BEAT_SECONDS = 2.0


class RayRollouts:
    """Workers on a Ray cluster, as `nano_rl.gather.rollouts` describes them. Thread-safe."""

    def __init__(
        self,
        setup: WorkerSetup,
        address: str,
        *,
        workers: int | None = None,
        patience: float = 60.0,
        sessions: int | None = None,
        follows: bool = True,
        status: Path | None = None,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`address` as `connect` takes it. A worker that is silent for `patience` seconds is replaced. At
        most `sessions` runs are under way at a time. With `follows`, a worker gets no job before it has
        adopted what was announced. `status` is a file for `nano-rl cluster status`. Raises as `connect`."""
        self._disconnect = connect(address)
        self._setup, self._address, self._patience = setup, address, patience
        self._count = workers or cluster_cpus()
        self._most = min(self._count * RUNS_AT_ONCE, sessions or self._count * RUNS_AT_ONCE)
        self._follows, self._status, self._on_change = follows, status, on_change
        self._queue: deque[QueuedJob] = deque()
        self._workers: list[RolloutWorker] = []
        self._lost: deque[LostWorker] = deque(maxlen=50)
        self._announced: tuple[PublishedAdapter, tuple[EngineState, ...]] | None = None
        self._announcements = 0
        self.replaced = 0
        self._made = self._start_failures = self._done = self._repeated = self._retries = 0
        self._looked = self._told = time.monotonic()
        self._problem: NanoError | None = None
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._supervisor = threading.Thread(target=self._supervise, name="nano-ray", daemon=True)
        self._supervisor.start()

    def collect(
        self, tasks: Sequence[Task], runtime: Runtime, *, group_size: int | Sequence[int] = 1, seed: int = 0,
        on_run: OnRun | None = None, reward: Reward | None = None,
    ) -> list[Trajectory]:  # fmt: skip
        """Run each task `group_size` times on the workers; returns [runs] in task order, as they are in the
        log of `runtime`, without those that the log redacted. Raises RolloutsFailed if a worker failed with
        an error of ours, or too many were lost."""
        queued = [
            QueuedJob(
                RolloutJob(
                    run=new_run_id(), task=task, seed=member_seed(seed, task, member),
                    sampling=runtime.sampling,
                ),
                Future(),
            )
            for task, member in members(tasks, group_size)
        ]  # fmt: skip
        with self._changed:
            self._refuse_ended()
            self._queue.extend(queued)
        done = []
        try:
            for one in queued:
                run = runtime.store.get(one.future.result())
                if on_run:
                    on_run(run)
                # the log-probs of a redacted run belong to a prompt that is not in the log
                if not run.is_redacted:
                    done.append(run)
        finally:
            for one in queued:
                one.future.cancel()
        return reward.apply(done, runtime) if reward else done

    def announce(self, adapter: PublishedAdapter, states: tuple[EngineState, ...]) -> Collection[str]:
        """Have all workers sample from an adapter; returns older ones that requests in flight use. Waits for
        workers that are open; one that is silent is replaced meanwhile. Raises as `collect`."""
        with self._changed:
            self._announced = adapter, states
            self._announcements += 1
            self._changed.wait_for(lambda: self._problem or self._all_adopted())
            self._refuse_ended()
            return frozenset[str]().union(*(worker.in_use for worker in self._workers))

    def metrics(self) -> dict[str, float]:
        """`workers`, `workers_idle` (mean share of their time without a run), `worker_memory_mb` (largest),
        `runs_queued`, and since the beginning `runs_repeated` (given to a second worker) and
        `worker_retries` (requests sent again to another server)."""
        with self._changed:
            workers = [worker for worker in self._workers if worker.opened]
            beats = [worker.beat for worker in workers if worker.beat]
            return {
                "workers": float(len(workers)),
                "workers_idle": sum(worker.idle for worker in workers) / max(1, len(workers)),
                "worker_memory_mb": max((beat.memory_mb for beat in beats), default=0.0),
                "runs_queued": float(len(self._queue)),
                "runs_repeated": float(self._repeated),
                "worker_retries": float(self._retries + sum(beat.retries for beat in beats)),
            }

    def close(self) -> None:
        """End the workers, and the cluster if it was started here. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._supervisor.join()
        for worker in self._workers:
            worker.kill()
        if self._status:
            self._status.unlink(missing_ok=True)
        self._disconnect()

    def status(self) -> ClusterStatus:
        with self._changed:
            return ClusterStatus(
                cluster=self._address, queued=len(self._queue), done=self._done, repeated=self._repeated,
                replaced=self.replaced, version=self._announced[0].version if self._announced else None,
                lost=tuple(self._lost),
                workers=tuple(worker.status(self._announcements) for worker in self._workers),
            )  # fmt: skip

    def _refuse_ended(self) -> None:
        if self._problem:
            raise self._problem

    def _all_adopted(self) -> bool:
        return all(w.adopted == self._announcements for w in self._workers if w.opened)

    # --------------------------------------------------------------- below, the supervisor's thread alone

    def _supervise(self) -> None:
        try:
            while not self._closed.is_set():
                with self._changed:
                    self._place()
                    self._ask()
                    self._assign()
                answers = ready(self._workers)
                with self._changed:
                    for worker in list(self._workers):
                        self._hear(worker, answers)
                    self._watch()
                    self._changed.notify_all()
                if self._status and time.monotonic() - self._told >= _BEAT_SECONDS:
                    self._told = time.monotonic()
                    self.status().write(self._status)
        except NanoError as problem:
            self._give_up(problem)
        finally:  # nobody may wait for a thread that has ended
            self._give_up(RolloutsFailed("the rollout workers have ended"))

    def _place(self) -> None:
        """Have an actor for each worker; with CPUs of its own where there are as many."""
        missing = self._count - len(self._workers)
        if not missing:
            return
        import ray

        cpus = int(ray.available_resources().get("CPU", 0.0) >= missing)
        for _ in range(missing):
            self._made += 1
            self._workers.append(RolloutWorker.place(self._made, self._setup, cpus))

    def _ask(self) -> None:
        """Tell workers of the adapter, and ask for beats."""
        now = time.monotonic()
        for worker in self._workers:
            if not worker.opened:
                continue
            if self._announced and worker.adopting < self._announcements and not worker.awaits("adopt"):
                worker.adopting = self._announcements
                worker.ask("adopt", *self._announced)
            if now - worker.beaten >= _BEAT_SECONDS and not worker.awaits("beat"):
                worker.ask("beat")

    def _assign(self) -> None:
        """Give jobs to the workers that have the fewest."""
        able = [w for w in self._workers if w.opened and (w.adopted or not self._follows)]
        running = sum(len(worker.jobs) for worker in self._workers)
        while self._queue and able and running < self._most:
            worker = min(able, key=lambda each: len(each.jobs))
            if len(worker.jobs) >= RUNS_AT_ONCE:
                return
            queued = self._queue.popleft()
            if queued.future.running() or queued.future.set_running_or_notify_cancel():
                worker.ask("run", queued.job, job=queued)
                running += 1

    def _hear(self, worker: RolloutWorker, answers: Collection[Any]) -> None:
        """Take a worker's answers. Raises RolloutsFailed for one that says it cannot work."""
        import ray

        for reference in [each for each in worker.asked if each in answers]:
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # neither an end of the worker nor an error of ours
                why = f"{type(error.cause).__name__}: {str(error.cause).partition(chr(10))[0]}"
                raise RolloutsFailed(f"{worker.where} failed: {why}") from None
            except ray.exceptions.RayError as error:
                return self._replace(worker, f"ended ({cause_of(error)})")
            worker.heard = time.monotonic()
            what = worker.asked.pop(reference)
            if isinstance(what, QueuedJob):
                self._finish(worker, what, answer)
            elif isinstance(answer, WorkerFailure):
                raise RolloutsFailed(f"{worker.where}: {answer.message}", answer.exit_code)
            elif isinstance(answer, WorkerFacts):
                worker.host, worker.pid, worker.opened = answer.host, answer.pid, True
                worker.began, self._start_failures = worker.heard, 0
            elif isinstance(answer, WorkerBeat):
                worker.beat, worker.beaten = answer, worker.heard
                for told in answer.told:
                    self._on_change(f"{worker.where}: {told}")
            else:
                worker.adopted, worker.in_use = worker.adopting, frozenset(answer)

    def _finish(self, worker: RolloutWorker, queued: QueuedJob, answer: str | Redo | WorkerFailure) -> None:
        worker.done += 1
        if isinstance(answer, str):
            self._done += 1
            queued.future.set_result(answer)
        elif isinstance(answer, Redo):
            self._on_change(f"run {queued.job.run} is rolled out again: {answer.why}")
            queued.job = replace(queued.job, run=new_run_id(), begun=False)
            self._queue.appendleft(queued)
        else:
            message = f"{worker.where}, run {queued.job.run}: {answer.message}"
            queued.future.set_exception(RolloutsFailed(message, answer.exit_code))

    def _watch(self) -> None:
        """Count who was busy, and replace who was silent."""
        now = time.monotonic()
        spent, self._looked = now - self._looked, now
        for worker in list(self._workers):
            worker.busy += spent if worker.jobs else 0
            limit = self._patience if worker.opened else START_SECONDS
            # after a pause of this process answers may be there that nobody has looked at
            if now - worker.heard > limit and spent < _BEAT_SECONDS:
                what = "was silent" if worker.opened else "was placed nowhere, or did not start,"
                self._replace(worker, f"{what} for {limit:g} seconds")

    def _replace(self, worker: RolloutWorker, why: str) -> None:
        """Kill a worker; its jobs go to others. Raises RolloutsFailed if one after another does not start."""
        worker.kill()
        self._workers.remove(worker)
        self._retries += worker.beat.retries if worker.beat else 0
        self._lost.append(worker.lost(why))
        self.replaced += 1
        for queued in reversed(worker.jobs):
            self._repeat(queued, f"{worker.where} {why}")
        self._start_failures += not worker.opened
        if self._start_failures >= START_FAILURES:
            raise RolloutsFailed(
                f"{START_FAILURES} rollout workers in a row did not start; {worker.where} {why}"
            )
        self._on_change(f"{worker.where} {why}; another one takes its place, and its {len(worker.jobs)} runs")

    def _repeat(self, queued: QueuedJob, why: str) -> None:
        queued.lost.append(why)
        queued.job = replace(queued.job, begun=True)
        if len(queued.lost) <= RETRIES:
            self._repeated += 1
            return self._queue.appendleft(queued)
        queued.future.set_exception(
            RolloutsFailed(
                f"run {queued.job.run} of task {queued.job.task.key} lost {len(queued.lost)} workers:"
                f" {'; '.join(queued.lost)}; the same command goes on from the last saved state"
            )
        )

    def _give_up(self, problem: NanoError) -> None:
        with self._changed:
            self._problem = self._problem or problem
            waiting = [*self._queue, *(one for worker in self._workers for one in worker.jobs)]
            self._queue.clear()
            for queued in waiting:
                if not queued.future.done():
                    queued.future.set_exception(problem)
            self._changed.notify_all()
