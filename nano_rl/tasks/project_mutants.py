"""Tasks from mutants of a user's project: one line of what a passing run left is changed, and its check fails.

The run's own check, in a fresh jail, decides: it must fail on the mutant, within the time of a few passes, and
pass once the line is put back, which is the oracle. The seed alone decides the order in which mutants are
tried: in turn over the functions of the files that the check reads, so that few tasks cover many functions.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from random import Random

from nano_coder.grading.command_check import laid_over, restored
from nano_coder.grading.command_run import CommandCheck, check_patience, tree_hash
from nano_coder.grading.protected_files import protected
from nano_coder.grading.submission import Delivery, grade_delivery
from nano_coder.sandbox.protocol import Sandbox
from nano_rl.tasks.from_log import texts_of
from nano_rl.tasks.mutate import Mutant, mutants_by_function
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.snapshot import EntryKind, Snapshot
from nano_shared.types import OracleAction, Provenance, Task, Trajectory, Verdict

GENERATOR = "nano-rl mutants 1"
MOST_RUNS = 64
"""passing runs whose workspaces are mutated, the newest ones"""
SECONDS = 300.0
"""time after which no further mutant is tried; their number then depends on the machine, as `report` says"""
TRIES = 4
"""mutants tried for each one that is asked for"""
_TIMES, _MORE = 3.0, 5.0
"""a mutant's check may take so many times the check's own time, and so many seconds more"""
_LARGEST = 200_000
"""bytes of a file that is mutated"""
_OUTCOMES = {
    "passes": "pass the check", "slow": "do not end in time", "dropped": "have no verdict that repeats",
    "held_out": "are in held-out tasks",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantTasks:
    """Tasks of mutants, and what became of the other mutants."""

    tasks: tuple[Task, ...]
    runs: int
    """number of passing runs whose workspaces were mutated"""
    dropped: Counter[str]
    """one of _OUTCOMES -> number of mutants"""
    seconds: float
    out_of_time: bool

    @property
    def report(self) -> str:
        tried = len(self.tasks) + self.dropped.total()
        why = "".join(f", {self.dropped[o]} {said}" for o, said in _OUTCOMES.items() if self.dropped[o])
        late = f"; stopped at {SECONDS:.0f} s" if self.out_of_time else ""
        return (
            f"mutants of what {self.runs} passing runs left: {len(self.tasks)} kept of {tried} tried{why};"
            f" {self.seconds:.0f} s{late}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Project:
    """The workspace that a passing run left, with tests and configuration as they were."""

    run: Trajectory
    command: str
    start: Snapshot
    tree: Snapshot
    blobs: BlobStore
    sandbox: Sandbox
    seconds: float | None = None
    """longest time of a mutant's check; None for that of any check"""

    @property
    def changed(self) -> set[str]:
        """Files that the run changed."""
        return set(snapshot.changed_paths(self.start, self.tree))

    def verdict(self, before: Snapshot, after: Snapshot) -> Verdict | None:
        delivery = Delivery(before=before, after=after, blobs=self.blobs)
        return grade_delivery(self.run.task, delivery, self.sandbox, timeout=self.seconds)

    def passes(self) -> bool:
        verdict = self.verdict(self.tree, self.tree)
        return verdict is not None and verdict.reward == 1

    def mutable(self) -> list[str]:
        """Python files that the check reads and an agent may change."""
        task, paths = self.run.task, set(self.tree.by_path)
        check = CommandCheck(
            command=self.command, blobs=self.blobs, sandbox=self.sandbox, limits=task.limits,
            seconds=check_patience(task.limits),
        )  # fmt: skip
        hidden = task.hidden.files if task.hidden else {}
        reads = check.original(laid_over(self.tree, hidden, self.blobs)).reads
        return [
            path for path in sorted(paths)
            if path.endswith(".py") and (reads is None or path in reads.read)
            and protected(path, self.command, paths) is None
        ]  # fmt: skip

    def functions(self, path: str) -> list[list[Mutant]]:
        """The mutants of each function of a file."""
        text = _text(self.tree, path, self.blobs)
        try:
            return list(mutants_by_function(text).values()) if text is not None else []
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []


def _text(tree: Snapshot, path: str, blobs: BlobStore) -> str | None:
    """The text of a small file, with the same lines for Python and for an editor; else None."""
    entry = tree.by_path.get(path)
    if entry is None or entry.kind is not EntryKind.FILE:
        return None
    data = blobs.get(str(entry.content))
    if len(data) > _LARGEST or b"\r" in data.replace(b"\r\n", b""):
        return None
    try:
        return data.decode()
    except UnicodeError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A mutant of a file of a project."""

    project: _Project
    path: str
    mutant: Mutant

    @property
    def tree(self) -> Snapshot:
        """The project with the mutant in place, whose text is stored in the blobs."""
        content = self.project.blobs.put(self.mutant.source.encode())
        entries = self.project.tree.entries
        return Snapshot(tuple(replace(e, content=content) if e.path == self.path else e for e in entries))

    def outcome(self) -> str:
        """`kept`, or one of _OUTCOMES."""
        project, mutated = self.project, self.tree
        verdict = project.verdict(mutated, mutated)
        state = verdict.checks.get("check") if verdict is not None else None
        if state in ("pass", "timeout"):
            return "passes" if state == "pass" else "slow"
        if verdict is None or state != "fail" or verdict.failure_kind is not None:
            return "dropped"
        mended = project.verdict(mutated, project.tree)
        return "kept" if mended is not None and mended.reward == 1 else "dropped"


def check_command(task: Task) -> str | None:
    """The shell line that decides over mutants of the task's project; None for a task without one, and for a
    task that was made of a mutant."""
    if task.provenance.generator == GENERATOR:
        return None
    if task.hidden is not None:
        return task.hidden.command if task.hidden.kind == "command" else None
    return task.check


def mutant_tasks(
    runs: Sequence[Trajectory], count: int, blobs: BlobStore, sandbox: Sandbox, *,
    seed: int, held_out: Collection[str] = (),
) -> MutantTasks:  # fmt: skip
    """At most `count` tasks of mutants of what passing runs left, whose check is a command and passes again.

    `held_out` are texts of files that none of the tasks may have as its changed file.
    """
    began, jobs, late = time.monotonic(), os.cpu_count() or 1, False
    tasks: list[Task] = []
    dropped: Counter[str] = Counter()
    projects = _projects(runs, blobs, sandbox)
    candidates = _candidates(projects, seed, held_out, dropped)
    with ThreadPoolExecutor(jobs) as pool:
        tries = TRIES * count
        while len(tasks) < count and (some := list(islice(candidates, min(jobs, tries)))):
            tries -= len(some)
            for candidate, outcome in zip(some, pool.map(_Candidate.outcome, some), strict=True):
                if outcome != "kept":
                    dropped[outcome] += 1
                elif len(tasks) < count:
                    tasks.append(_task(candidate, projects, seed))
            if late := time.monotonic() - began > SECONDS:
                break
    seconds = time.monotonic() - began
    return MutantTasks(
        tasks=tuple(tasks), runs=len(projects), dropped=dropped, seconds=seconds, out_of_time=late
    )


def _projects(runs: Sequence[Trajectory], blobs: BlobStore, sandbox: Sandbox) -> list[_Project]:
    """Different projects whose check passes again on what the run left, the newest first."""
    found: dict[str, _Project] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.id), reverse=True):
        project = _project(run, blobs, sandbox)
        if project is None or (same := f"{tree_hash(project.tree)} {project.command}") in found:
            continue
        began = time.monotonic()
        if len(found) < MOST_RUNS and project.passes():
            found[same] = replace(project, seconds=_TIMES * (time.monotonic() - began) + _MORE)
    return list(found.values())


def _project(run: Trajectory, blobs: BlobStore, sandbox: Sandbox) -> _Project | None:
    command = check_command(run.task)
    if command is None or run.snapshot is None:
        return None
    try:
        start, left = (snapshot.load(str(each), blobs) for each in (run.snapshot, run.last_snapshot))
    except UsageError:  # its blobs are gone
        return None
    tree, _ = restored(command, start, left, run.task.artifacts)
    return _Project(run=run, command=command, start=start, tree=tree, blobs=blobs, sandbox=sandbox)


def _candidates(
    projects: Sequence[_Project], seed: int, held_out: Collection[str], dropped: Counter[str]
) -> Iterator[_Candidate]:
    """The mutants in the order in which they are tried, those of files that runs changed first.

    No two have the same changed file and check, and none has the bug that a run found and mended.
    """
    rng = Random(f"mutants {seed}")
    first: list[list[_Candidate]] = []
    others: list[list[_Candidate]] = []
    for project in projects:
        for path in project.mutable():
            for of_function in project.functions(path):
                rng.shuffle(of_function)
                (first if path in project.changed else others).append(
                    [_Candidate(project=project, path=path, mutant=mutant) for mutant in of_function]
                )
    known = {(p.command, path, _text(p.start, path, p.blobs)) for p in projects for path in p.changed}
    for functions in (first, others):
        rng.shuffle(functions)
        for candidate in (each for turn in zip_longest(*functions) for each in turn if each is not None):
            source = candidate.mutant.source
            key = (candidate.project.command, candidate.path, source)
            if source in held_out:
                dropped["held_out"] += 1
            elif key not in known:
                known.add(key)
                yield candidate


def _task(candidate: _Candidate, projects: Sequence[_Project], seed: int) -> Task:
    project, mutant, tree = candidate.project, candidate.mutant, candidate.tree
    origin, prompt = project.run.task, _prompt(project, projects)
    files = texts_of(tree, project.blobs)
    start = None if files is not None else snapshot.save(tree, project.blobs)
    digest = content_hash([prompt, tree_hash(tree), project.command]).removeprefix("sha256:")[:16]
    back = {"path": candidate.path, "line": mutant.line, "new": mutant.old}
    oracle = (OracleAction(name="edit_file", arguments=back), OracleAction(name="submit"))
    update = {
        "key": f"mutant-{digest}", "prompt": prompt, "files": files or {}, "snapshot": start,
        "oracle": oracle if origin.tools is None or "edit_file" in origin.tools else None,
        "provenance": Provenance(source=f"log: run {project.run.id}", generator=GENERATOR, seed=seed),
    }  # fmt: skip
    return origin.model_copy(update=update)


def _prompt(project: _Project, projects: Sequence[_Project]) -> str:
    """The run's prompt if it is about no single bug, else the one fact that is known: the check fails.

    Two runs with one prompt that changed different files, and passed, show that it describes neither change.
    """
    said, changed = project.run.task.prompt, project.changed
    if any(p.run.task.prompt == said and p.changed and not p.changed & changed for p in projects if changed):
        return said
    failing = "A hidden check" if project.run.task.hidden else f"`{project.command}`"
    return f"{failing} fails. Find the bug and fix it."
