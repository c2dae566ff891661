"""Mining: packages are traced, their functions broken, and the candidates admitted, by several workers.

Each finished piece of work (the trace of a test file, the candidates of a function) is a line of a journal,
so that a mining which was killed goes on where it was, and ends with the same tasks.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

from nano_coder.sandbox.protocol import Jail, Sandbox
from nano_mining.candidates import GENERATOR, CandidateTrials, MinedTarget, mined_targets
from nano_mining.packages import MinedPackage
from nano_mining.releases import ReleasePair
from nano_mining.targets import targets_of
from nano_mining.traces import trace_file, traced_tests
from nano_rl.tasks.suite import split_of
from nano_shared import snapshot
from nano_shared.errors import SandboxError, UsageError
from nano_shared.files import content_hash
from nano_shared.snapshot import BlobStore
from nano_shared.strict_json import Row
from nano_shared.types import Limits, Task

_TOGETHER = 8
"""functions that are tried in one jail"""
_STOP_EVERY_S = 0.1
Work = TypeVar("Work")
OnProgress = Callable[[int, int, str], None]
"""(done, all, remark)"""


class StoppableSandbox:
    """A sandbox whose jails other threads can stop, after which all raises SandboxError."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner, self._stopped = inner, False
        self._open: dict[int, Jail] = {}

    def open(self, workspace: Path | None, limits: Limits) -> Any:
        self._refuse_stopped()
        jail = self._inner.open(workspace, limits)
        self._open[id(jail)] = jail
        return _StoppableJail(jail, self)

    def stop(self) -> None:
        """End what runs now; again, for what began meanwhile."""
        self._stopped = True
        for jail in list(self._open.values()):
            getattr(jail, "interrupt", jail.close)()

    def forget(self, jail: Jail) -> None:
        self._open.pop(id(jail), None)

    def _refuse_stopped(self) -> None:
        if self._stopped:
            raise SandboxError("the mining was interrupted")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _StoppableJail:
    def __init__(self, inner: Jail, sandbox: StoppableSandbox) -> None:
        self._inner, self._sandbox = inner, sandbox

    def close(self) -> None:
        self._sandbox.forget(self._inner)
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        self._sandbox._refuse_stopped()
        return getattr(self._inner, name)


class MiningJournal:
    """The finished pieces of work by their id, one JSON line each; a torn last line is dropped."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if the file cannot be read as a journal, or written."""
        try:
            data = path.read_bytes() if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            self.rows: dict[str, Row] = {r.pop("id"): r for r in map(json.loads, whole.splitlines())}
            self._file = path.open("r+b" if path.exists() else "wb")
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        except (OSError, ValueError, KeyError, AttributeError) as problem:
            raise UsageError(f"{path}: no journal of a mining ({problem}); delete it to start anew") from None

    def add(self, id: str, row: Row) -> None:
        self.rows[id] = row
        self._file.write(json.dumps({"id": id, **row}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(slots=True, kw_only=True)
class PackageYield:
    """What one package gave."""

    origin: str
    licence: str | None
    functions: int = 0
    """functions and classes"""
    called: int = 0
    """of which so many are called by a test"""
    repeated: int = 0
    """of which so many are programs that came before"""
    tried: int = 0
    """of which so many were broken and tried"""
    tasks: Counter[str] = field(default_factory=Counter)
    """by kind"""
    refused: Counter[str] = field(default_factory=Counter)
    """candidates by kind and reason"""

    def as_json(self) -> Row:
        counts = {name: getattr(self, name) for name in ("functions", "called", "repeated", "tried")}
        by_kind = {"tasks": dict(self.tasks), "refused": dict(self.refused.most_common())}
        return {"package": self.origin, "licence": self.licence, **counts, **by_kind}


@dataclass(slots=True, kw_only=True)
class ReleaseYield:
    """What the releases of one package gave."""

    package: str
    pairs: int = 0
    tasks: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """pairs, test files, tests and fixes by reason"""

    def as_json(self) -> Row:
        refused = dict(self.refused.most_common())
        return {"package": self.package, "pairs": self.pairs, "tasks": self.tasks, "refused": refused}

    def __str__(self) -> str:
        why = "".join(f"\n  {number} {reason}" for reason, number in self.refused.most_common())
        return f"{self.package}: {self.tasks} tasks of {self.pairs} pairs of releases; not used:{why}"


@dataclass(slots=True, kw_only=True)
class Miner:
    """What a mining works with."""

    store: BlobStore
    """of the log: the workspaces of the tasks go there"""
    sandbox: StoppableSandbox
    journal: MiningJournal
    kinds: tuple[str, ...]
    bugs: int
    seed: int
    workers: int
    on_progress: OnProgress
    interrupted: bool = False

    def mine(self, packages: Sequence[MinedPackage]) -> tuple[list[Task], list[PackageYield]]:
        """The tasks of all packages in their order, and what each package gave. Ctrl-C ends it with what is
        there by then; `interrupted` says so."""
        files = [(package, file) for package in packages for file in package.tests]
        self._run("traced", files, _trace_id, lambda job: {"rows": trace_file(*job, self.sandbox)})
        yields = [PackageYield(origin=str(p.origin), licence=p.origin.licence) for p in packages]
        jobs = [
            (found, some)
            for found, of_package in groupby(self._targets(packages, yields), key=itemgetter(0))
            for targets in [[mined for _, mined in of_package]]
            for some in (targets[n : n + _TOGETHER] for n in range(0, len(targets), _TOGETHER))
        ]
        turns = Counter[str]()
        in_turn = sorted(jobs, key=lambda job: turns.update([job[0].origin]) or turns[job[0].origin])
        self._run("mined", [some for _, some in in_turn], self._id, self._candidates)
        tasks: dict[str, Task] = {}
        for found, some in jobs:
            row = self.journal.rows.get(self._id(some))
            if row is None:
                continue
            found.tried += len(some)
            found.refused.update(row["refused"])
            for task in map(Task.model_validate, row["tasks"]):
                if tasks.setdefault(task.key, task) is task:
                    found.tasks[str(task.view).removeprefix("mined_")] += 1
        return list(tasks.values()), yields

    def mine_releases(self, pairs: Sequence[ReleasePair]) -> tuple[list[Task], list[ReleaseYield]]:
        """The tasks of all pairs of releases in their order, and what each gave; Ctrl-C as in `mine`."""
        self._run("compared", pairs, attrgetter("id"), lambda pair: self._row(pair.fixes(self.sandbox)))
        tasks: dict[str, Task] = {}
        yields: dict[str, ReleaseYield] = {}
        for pair in pairs:
            found = yields.setdefault(pair.old.package, ReleaseYield(package=pair.old.package))
            if (row := self.journal.rows.get(pair.id)) is not None:
                found.pairs += 1
                found.refused.update(row["refused"])
                for task in map(Task.model_validate, row["tasks"]):
                    found.tasks += tasks.setdefault(task.key, task) is task
        return list(tasks.values()), list(yields.values())

    def _targets(
        self, packages: Sequence[MinedPackage], yields: Sequence[PackageYield]
    ) -> Iterator[tuple[PackageYield, MinedTarget]]:
        """The functions and classes that tests call; of programs that are the same, the first."""
        programs: set[str] = set()
        for package, found in zip(packages, yields, strict=True):
            rows = (self.journal.rows[_trace_id((package, file))]["rows"] for file in package.tests)
            tests = traced_tests(row for some in rows for row in some)
            targets = [t for path, text in package.modules.items() for t in targets_of(path, text)]
            found.functions = len(targets)
            for target, calling, family in mined_targets(package, targets, tests, len(packages) == 1):
                found.called += 1
                found.repeated += target.hash in programs
                if target.hash not in programs:
                    programs.add(target.hash)
                    yield (
                        found,
                        MinedTarget(
                            package=package,
                            target=target,
                            tests=calling,
                            family=family,
                            split=split_of(family),
                        ),
                    )

    def _id(self, some: Sequence[MinedTarget]) -> str:
        """Everything that the tasks of targets depend on."""
        settings = [GENERATOR, self.kinds, self.bugs, self.seed, some[0].package.id]
        named = [[m.family, m.target.path, m.target.name, m.target.first] for m in some]
        return content_hash([settings, named])

    def _candidates(self, some: Sequence[MinedTarget]) -> Row:
        trials = CandidateTrials(kinds=self.kinds, bugs=self.bugs, seed=self.seed, sandbox=self.sandbox)
        try:
            return self._row(trials.admit(some))
        except SyntaxError as problem:  # a part of a module, in a form that this Python does not read alone
            return {"tasks": [], "refused": {f"source: {problem.msg}": len(some)}}

    def _row(self, found: Iterable[tuple[Task | None, str, BlobStore]]) -> Row:
        """Of candidates the tasks, whose workspaces are stored, and the reasons against the others."""
        tasks: list[Row] = []
        refused: Counter[str] = Counter()
        for task, why, blobs in found:
            if task is None:
                refused[why] += 1
            else:
                if task.snapshot is not None:
                    snapshot.copy(task.snapshot, blobs, self.store)
                tasks.append(task.model_dump(mode="json", exclude_defaults=True))
        return {"tasks": tasks, "refused": dict(refused)}

    def _run(
        self, label: str, jobs: Sequence[Work], name: Callable[[Work], str], work: Callable[[Work], Row]
    ) -> None:
        """Do the jobs that the journal lacks, some at once, and note each when it is done. Ctrl-C ends those
        that make tasks with what is there by then."""
        left = [job for job in jobs if name(job) not in self.journal.rows]
        done, count = len(jobs) - len(left), 0
        try:
            for job, row in in_threads(left, work, self.workers, self.sandbox.stop):
                self.journal.add(name(job), row)
                done, count = done + 1, count + len(row.get("tasks", ()))
                self.on_progress(done, len(jobs), f"{label}; {count} tasks now" if "tasks" in row else label)
        except KeyboardInterrupt:
            if label == "traced":
                raise
            self.interrupted = True


def _trace_id(job: tuple[MinedPackage, str]) -> str:
    package, file = job
    return f"trace 1 {package.id} {file}"


def in_threads(
    jobs: Iterable[Work], work: Callable[[Work], Row], workers: int, stop: Callable[[], None]
) -> Iterator[tuple[Work, Row]]:
    """Each job with its result, as they end; so many at a time. What runs where the iteration ends early is
    stopped by `stop`, which is called until it has ended."""
    source = iter(jobs)
    pool = ThreadPoolExecutor(workers)
    running: dict[Future[Row], Work] = {pool.submit(work, job): job for job in islice(source, workers)}
    try:
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                yield job, future.result()
                for following in islice(source, 1):
                    running[pool.submit(work, following)] = following
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in running):
            stop()
            time.sleep(_STOP_EVERY_S)
