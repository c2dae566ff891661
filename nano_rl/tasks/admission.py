"""Admission of many tasks: checks in several processes, and drawing candidates until enough are admitted.

Each process has its own sandbox and a temporary log.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.protocol import Sandbox
from nano_rl.tasks.attempts import ORACLE, PluginsOff
from nano_rl.tasks.check import TaskFinding, check_task
from nano_shared.blobs import BlobStore, open_blobs
from nano_shared.errors import UsageError
from nano_shared.files import content_hash, in_memory, scratch_folder
from nano_shared.process import SAFE_PATH, safe_workers
from nano_shared.store import LogStore
from nano_shared.types import Split, Task


def log_folder() -> AbstractContextManager[Path]:
    """A temporary folder for logs, in memory if there is room."""
    return scratch_folder("check", in_memory())


def scratch_runtime(
    folder: Path, blobs: str | Path | None = None, opener: Callable[[], Sandbox] = open_sandbox
) -> Runtime:
    """A runtime with its own log in `folder`; `blobs` are those of the log whose snapshots tasks start
    from, and `opener` opens its sandbox."""
    log = tempfile.mkdtemp(prefix=f"check-{os.getpid()}-", dir=folder)
    store = LogStore.open(Path(log) / "log.db")
    if blobs is not None:
        store.blobs = _SharedBlobs(store.blobs.root, open_blobs(blobs))
    return Runtime(
        policy=ScriptedPolicy([]),
        sandbox=PluginsOff(opener()),
        store=store,
        profile=COMPACT_1,
        policy_name=ORACLE,
    )


class _SharedBlobs(BlobStore):
    """A blob store that also reads the blobs of another log."""

    def __init__(self, root: Path, log: BlobStore) -> None:
        super().__init__(root)
        self._log = log

    def get(self, blob: str) -> bytes:
        return super().get(blob) if super().__contains__(blob) else self._log.get(blob)

    def __contains__(self, blob: str) -> bool:
        return super().__contains__(blob) or blob in self._log


AHEAD = 8
"""number of tasks per process that are submitted ahead"""
PATIENCE = 200
"""number of tasks refused in a row after which drawing stops with an error"""

_runtime: Runtime | None = None
"""runtime of this worker process"""


def _start(folder: Path, blobs: str | Path | None, opener: Callable[[], Sandbox]) -> None:
    global _runtime
    os.environ.pop(SAFE_PATH, None)  # it was for the start of this process
    _runtime = scratch_runtime(folder, blobs, opener)


def _work(task: Task) -> TaskFinding:
    assert _runtime is not None, "the pool starts its workers with _start"
    return check_task(task, _runtime)


def check_tasks(
    tasks: Iterable[Task],
    *,
    jobs: int = 2,
    blobs: str | Path | None = None,
    opener: Callable[[], Sandbox] = open_sandbox,
) -> Iterator[tuple[Task, TaskFinding]]:
    """Each task with its finding, in order. `tasks` may be infinite; it is read a few tasks ahead.

    `blobs` are those of the log whose snapshots tasks start from, `opener` opens the sandbox. One job
    runs in this process, several in worker processes.
    """
    with log_folder() as folder, safe_workers():
        if jobs == 1:
            runtime = scratch_runtime(folder, blobs, opener)
            with runtime.store:
                for task in tasks:
                    yield task, check_task(task, runtime)
            return
        context = multiprocessing.get_context("spawn")  # a fork would share launchers and connections
        begin = (folder, blobs, opener)
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=begin)
        waiting: deque[tuple[Task, Future[TaskFinding]]] = deque()
        source = iter(tasks)
        try:
            for task in itertools.islice(source, jobs * AHEAD):
                waiting.append((task, pool.submit(_work, task)))
            while waiting:
                task, future = waiting.popleft()
                finding = future.result()
                for following in itertools.islice(source, 1):
                    waiting.append((following, pool.submit(_work, following)))
                yield task, finding
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def without_repeats(
    found: Iterable[tuple[Task, TaskFinding]], *, others: Mapping[str, str] = {}
) -> Iterator[tuple[Task, TaskFinding]]:
    """Refuse repeated problems (same prompt and files), and programs that occur in another split.

    `others` maps hashes of programs that must not occur to their origin.
    """
    problems: dict[str, str] = {}
    programs: dict[str, tuple[Split | None, str]] = {}
    for task, finding in found:
        checks = dict(finding.checks)
        problem = content_hash([task.prompt, dict(task.files), task.snapshot])
        if problem in problems:
            checks["repeated"] = f"the same prompt and files as {problems[problem]}"
        problems.setdefault(problem, task.key)
        if task.program_hash is not None:
            split, key = programs.setdefault(task.program_hash, (task.split, task.key))
            if split is not task.split:
                checks["contamination"] = f"the same program as {key} of split {split}"
            if task.program_hash in others:
                checks["contamination"] = f"the same program as {others[task.program_hash]}"
        yield task, finding if checks == finding.checks else replace(finding, checks=checks)


def admitted_tasks(
    candidates: Iterable[Task], n: int, *, jobs: int = 2, on_task: Callable[[TaskFinding], None] | None = None
) -> tuple[list[Task], list[TaskFinding]]:
    """(the first `n` admitted candidates, all findings up to the last of them).

    A smaller `n` gives a prefix. Raises UsageError if PATIENCE candidates in a row are refused.
    """
    kept: list[Task] = []
    findings: list[TaskFinding] = []
    refused: list[TaskFinding] = []
    stream = check_tasks(candidates, jobs=jobs)
    try:
        for task, finding in without_repeats(stream):
            findings.append(finding)
            if finding.admitted:
                kept.append(task)
                refused.clear()
            else:
                refused.append(finding)
            if on_task:
                on_task(finding)
            if len(kept) == n:
                break
            if len(refused) == PATIENCE:
                raise UsageError(
                    f"{len(kept)} of {n} tasks admitted, then {PATIENCE} refused in a row, the last for: "
                    f"{refused[-1].reasons[0]}; ask for fewer, or for more views"
                )
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    return kept, findings


def programs_of(tasks: Sequence[Task], source: str) -> dict[str, str]:
    """Program hash -> origin, for the tasks that have one."""
    return {t.program_hash: f"{t.key} of {source}" for t in tasks if t.program_hash is not None}
