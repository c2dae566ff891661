"""Tasks from logged runs: the starting workspace of a run, its prompt, and a check, graded again."""

from __future__ import annotations

import ast
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import PurePosixPath
from random import Random

from nano_coder.grading.command_check import restored, tree_hash
from nano_coder.grading.grade import Delivery, grade_delivery, grade_trajectory
from nano_coder.grading.protected_files import ShellLine
from nano_coder.sandbox.protocol import Sandbox
from nano_rl.tasks.code_places import function_at, functions_of, text_of
from nano_rl.tasks.mutate import Mutant, mutant_of, splices_by_function
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import CommandChecks, SuiteChecks, WorkspaceChecks
from nano_shared.process import parse
from nano_shared.snapshot import BlobStore, EntryKind, Snapshot, save
from nano_shared.types import OracleAction, Provenance, Task, Trajectory, Trust, Verdict

GENERATOR = "nano-rl tasks from-log"
MOST_BYTES = 1 << 20
"""largest size of starting files that a task row contains; larger ones stay in the blob store"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTask:
    task: Task
    run: str
    reward: float | None
    """of the run under the task's check; None if it could not be graded"""
    failure_kind: str | None = None
    """why the check gave no verdict, such as `check_not_found`"""

    @property
    def trust(self) -> Trust:
        hidden = self.task.hidden
        if hidden is None or isinstance(hidden, WorkspaceChecks):
            own = hidden is None and not self.task.check_trusted
            return Trust.NONE if own else Trust.USER_CHECK
        strict = isinstance(hidden, SuiteChecks) and hidden.suite.strict
        return Trust.STRICT if strict else Trust.HIDDEN

    @property
    def portable(self) -> bool:
        """True if the row contains its files; otherwise it needs the blobs of its log."""
        return self.task.snapshot is None


def task_from_run(
    run: Trajectory, blobs: BlobStore, sandbox: Sandbox, check: str | None = None
) -> LoggedTask:
    """A task with the starting workspace of a run. Its check is `check`, which is hidden, or the run's own.
    If the run passes the check, its actions are the oracle. Raises UsageError for a run without a snapshot of
    its start, with missing blobs, or without a check."""
    if run.snapshot is None:
        raise UsageError(
            f"run {run.id} has no snapshot of the workspace that it started in (it was imported, or never got"
            " one), so no task can be made of it"
        )
    task = _task(run, snapshot.load(run.snapshot, blobs), blobs, check)
    ended = run.stop is not None and not run.stop.ours
    judged = run.model_copy(update={"task": task})
    verdict = grade_trajectory(judged, sandbox, blobs) if ended else None
    reward = verdict.reward if verdict is not None else None
    if reward == 1:
        oracle = _oracle(run)
        limits = task.limits.model_copy(update={"max_turns": max(task.limits.max_turns, len(oracle))})
        task = task.model_copy(update={"oracle": oracle, "limits": limits})
    failure = verdict.failure_kind if verdict is not None else None
    return LoggedTask(task=task, run=run.id, reward=reward, failure_kind=failure)


def distinct(made: list[LoggedTask]) -> list[LoggedTask]:
    """One task per key, in order, preferably one with an oracle."""
    kept: dict[str, LoggedTask] = {}
    for logged in made:
        known = kept.get(logged.task.key)
        if known is None or (known.task.oracle is None and logged.task.oracle is not None):
            kept[logged.task.key] = logged
    return list(kept.values())


def _task(run: Trajectory, start: Snapshot, blobs: BlobStore, check: str | None) -> Task:
    origin = run.task
    if check is None and origin.check is None and origin.hidden is None:
        raise UsageError(f"run {run.id} has no check of its own; give one with --check")
    files = texts_of(start, blobs)
    hidden = CommandChecks(command=check) if check is not None else origin.hidden
    graded = [origin.check, hidden.full_dump() if hidden else None]
    shown = [image.blob for image in origin.images]
    digest = content_hash([origin.prompt, run.snapshot, graded, *shown]).removeprefix("sha256:")[:16]
    update = {
        "key": f"log-{digest}", "files": files or {}, "hidden": hidden,
        "snapshot": None if files is not None else run.snapshot,
        "oracle": None if check is not None else origin.oracle,
        "provenance": Provenance(source=f"log: run {run.id}", generator=GENERATOR),
    }  # fmt: skip
    return origin.model_copy(update=update)


def texts_of(tree: Snapshot, blobs: BlobStore) -> dict[str, str] | None:
    """Path -> text; None if the tree has links, executables, binary files, empty folders or too many
    bytes."""
    files: dict[str, str] = {}
    size = 0
    for entry in tree.entries:
        if entry.kind is EntryKind.DIRECTORY:
            if not any(path.startswith(f"{entry.path}/") for path in tree.by_path):
                return None
            continue
        if entry.kind is not EntryKind.FILE or entry.mode & 0o111:
            return None
        data = blobs.get(str(entry.content))
        size += len(data)
        try:
            entry.path.encode()
            files[entry.path] = data.decode()
        except UnicodeError:
            return None
        if size > MOST_BYTES:
            return None
    return files


def _oracle(run: Trajectory) -> tuple[OracleAction, ...]:
    """The actions of the run, with `submit` added at the end if it is missing."""
    actions = [
        OracleAction(name=call.name, arguments=call.arguments, thought=turn.thought if first == 0 else "")
        for turn in run.turns
        for first, call in enumerate(turn.calls)
    ]
    if not actions or actions[-1].name != "submit":
        actions.append(OracleAction(name="submit"))
    return tuple(actions)


MUTANT_GENERATOR = "nano-rl mutants 1"
SECONDS = 300.0
"""after which no further mutant is tried: the one thing that makes their number depend on the machine"""
TRIES = 4
"""mutants tried for each one that is asked for"""
_TIMES, _MORE = 3.0, 5.0
"""a mutant's check may take so many times the check's own time, and so many seconds more"""
_FAILING = re.compile(r"^FAILED \S*::(\w+)", re.MULTILINE)
"""the name of a failing test in pytest's summary"""
_LARGEST = 200_000


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
        return set(snapshot.changed_paths(self.start, self.tree))

    def verdict(self, before: Snapshot, after: Snapshot) -> Verdict | None:
        delivery = Delivery(before=before, after=after, blobs=self.blobs)
        return grade_delivery(self.run.task, delivery, self.sandbox, timeout=self.seconds)

    def passes(self, start: Snapshot) -> bool:
        """Whether the check passes on what the run left, as the work of an agent that began at `start`."""
        verdict = self.verdict(start, self.tree)
        return verdict is not None and verdict.reward == 1

    def mutable(self) -> list[str]:
        """Python files that an agent may change, and that the check or another file names."""
        hidden = self.run.task.hidden
        files = hidden.files if isinstance(hidden, CommandChecks) else {}
        line = ShellLine(self.command, self.tree, self.blobs)
        sources = [path for path in self.tree.by_path if path.endswith(".py")]
        texts = {path: files.get(path) or line.original(path) for path in {*sources, *files}}
        texts[""] = self.command
        words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
        return [
            path for path in sorted(sources)
            if any(PurePosixPath(path).stem in found for other, found in words.items() if other != path)
            and line.protected(path) is None
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    project: _Project
    path: str
    mutant: Mutant

    @property
    def tree(self) -> Snapshot:
        """The project with the mutant in place, whose text is stored in the blobs."""
        content = self.project.blobs.put(self.mutant.source.encode())
        entries = self.project.tree.entries
        return Snapshot(tuple(replace(e, content=content) if e.path == self.path else e for e in entries))

    def trial(self) -> _Trial:
        """The check on the mutant and on the line put back."""
        mutated = self.tree
        verdict = self.project.verdict(mutated, mutated)
        state = verdict.checks.get("check") if verdict is not None else None
        if state in ("pass", "timeout"):
            return _Trial(refusal="pass the check" if state == "pass" else "do not end in time")
        if verdict is None or state != "fail" or verdict.failure_kind or not self.project.passes(mutated):
            return _Trial(refusal="have no verdict that repeats")
        return _Trial(output=verdict.check_run.output if verdict.check_run else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    refusal: str | None = None
    """why no task is made of it; None if the check fails on it and passes on the line put back"""
    output: str = ""


def check_command(task: Task) -> str | None:
    """The shell line that grades a task; None for a task without one, and for one made of a mutant."""
    if task.provenance.generator == MUTANT_GENERATOR:
        return None
    if task.hidden is not None:
        return task.hidden.command if isinstance(task.hidden, CommandChecks) else None
    return task.check


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantSearch:
    count: int
    seed: int
    held_out: Collection[str] = ()
    """texts of files that no task may have as its changed file"""
    seconds: float = SECONDS
    """after which no further mutant is tried"""
    turn: Callable[[str], int] = lambda place: 0
    """of a place (`PATH::FUNCTION`): functions with lower numbers are mutated first"""


def mutant_tasks(
    runs: Iterable[Trajectory], search: MutantSearch, blobs: BlobStore, sandbox: Sandbox, *,
    on_task: Callable[[Task], object] = lambda task: None,
) -> tuple[list[Task], str]:  # fmt: skip
    """At most `search.count` tasks of mutants of what passing runs left, and a report of what was tried;
    `on_task` gets each task as it is found."""
    count, seconds = search.count, search.seconds
    began, jobs, tries = time.monotonic(), os.cpu_count() or 1, TRIES * count
    tasks: list[Task] = []
    refused: Counter[str] = Counter()
    projects = _projects(runs, blobs, sandbox, seconds)
    candidates = _candidates(projects, search, refused)
    with ThreadPoolExecutor(jobs) as pool:
        while len(tasks) < count and time.monotonic() < began + seconds:
            if not (some := list(islice(candidates, min(jobs, tries)))):
                break
            tries -= len(some)
            for candidate, trial in zip(some, pool.map(_Candidate.trial, some), strict=True):
                if trial.refusal is not None:
                    refused[trial.refusal] += 1
                elif len(tasks) < count:
                    tasks.append(_mutant_task(candidate, trial, projects, search.seed))
                    on_task(tasks[-1])
    dropped = "".join(f", {number} {why}" for why, number in refused.most_common())
    return tasks, (
        f"mutants of what {len(projects)} passing runs left: {len(tasks)} kept of {count} wanted and"
        f" {len(tasks) + refused.total()} tried{dropped}; {time.monotonic() - began:.0f} s"
    )


def _projects(
    runs: Iterable[Trajectory], blobs: BlobStore, sandbox: Sandbox, seconds: float
) -> list[_Project]:
    """The different projects whose check passes again on what the run left, the newest first."""
    found: dict[str, _Project] = {}
    until = time.monotonic() + seconds / 2
    for run in sorted(runs, key=lambda run: (run.started, run.id), reverse=True):
        command = check_command(run.task)
        if command is None or run.snapshot is None:
            continue
        try:
            start, left = (snapshot.load(str(each), blobs) for each in (run.snapshot, run.last_snapshot))
        except UsageError:  # its blobs were deleted
            continue
        tree = restored(command, start, left, blobs, run.task.artifacts).tree
        project = _Project(run=run, command=command, start=start, tree=tree, blobs=blobs, sandbox=sandbox)
        began, same = time.monotonic(), f"{tree_hash(tree)} {command}"
        if began < until and same not in found and project.passes(tree):
            found[same] = replace(project, seconds=_TIMES * (time.monotonic() - began) + _MORE)
    return list(found.values())


def _candidates(
    projects: Sequence[_Project], search: MutantSearch, refused: Counter[str]
) -> Iterator[_Candidate]:
    """The mutants in the order in which they are tried, all different, and none with a bug that a run mended:
    one of each function in turn, those of files that runs changed first."""
    rng = Random(f"mutants {search.seed}")
    functions = [
        (f"{path}::{name}", [(project, path, text, splice) for splice in of_function])
        for project in projects
        for path in project.mutable()
        for text in [_text(project.tree, path, project.blobs)]
        for known_functions in [functions_of(text)]
        for of_function in splices_by_function(text)
        for name in [function_at(of_function[0].line, known_functions)]
    ]
    for _, of_function in functions:
        rng.shuffle(of_function)
    rng.shuffle(functions)
    order = [
        (path not in project.changed, search.turn(place), number)
        for number, (place, [(project, path, _, _), *_]) in enumerate(functions)
    ]
    turns = zip_longest(*(functions[number][1] for *_, number in sorted(order)))
    known = {(p.command, path, _text(p.start, path, p.blobs)) for p in projects for path in p.changed}
    in_turn = (each for turn in turns for each in turn if each is not None)
    for project, path, text, splice in in_turn:
        mutant = mutant_of(text, splice)
        if mutant is None or (key := (project.command, path, mutant.source)) in known:
            continue
        known.add(key)
        if mutant.source in search.held_out:
            refused["are in held-out tasks"] += 1
        else:
            yield _Candidate(project=project, path=path, mutant=mutant)


def _text(tree: Snapshot, path: str, blobs: BlobStore) -> str:
    """The text of a file; empty if it is large, is no text, or has a carriage return alone, which ends a line
    for Python and none for `edit_file`."""
    text = text_of(tree, path, blobs) or ""
    return "" if len(text.encode()) > _LARGEST or "\r" in text.replace("\r\n", "") else text


def _mutant_task(candidate: _Candidate, trial: _Trial, projects: Sequence[_Project], seed: int) -> Task:
    project, tree = candidate.project, candidate.tree
    origin, prompt = project.run.task, _prompt(project, projects)
    files = texts_of(tree, project.blobs)
    digest = content_hash([prompt, tree_hash(tree), project.command]).removeprefix("sha256:")[:16]
    oracle = _mutant_oracle(candidate, trial) if origin.tools is None or "edit_file" in origin.tools else None
    turns = max(origin.limits.max_turns, len(oracle or ()))
    update = {
        "key": f"mutant-{digest}", "prompt": prompt, "files": files or {},
        "snapshot": None if files is not None else save(tree, project.blobs),
        "limits": origin.limits.model_copy(update={"max_turns": turns}), "oracle": oracle,
        "provenance": Provenance(source=f"log: run {project.run.id}", generator=MUTANT_GENERATOR, seed=seed),
    }  # fmt: skip
    return origin.model_copy(update=update)


def _mutant_oracle(candidate: _Candidate, trial: _Trial) -> tuple[OracleAction, ...]:
    """Run the check, read the file, quote the function's head and the wrong line, put it back, submit."""
    task, mutant, path = candidate.project.run.task, candidate.mutant, candidate.path
    known = _FAILING.search(trial.output)
    head = _head(mutant.source, mutant.line)
    thought = [f"{known[1]} fails."] if known else []
    thought += [f"{n}|{mutant.source.splitlines()[n - 1]}" for n in head]
    actions = [
        OracleAction(name="shell", arguments={"command": candidate.project.command}),
        OracleAction(name="read_file", arguments={"path": path}),
        OracleAction(
            name="edit_file", arguments={"path": path, "line": mutant.line, "new": mutant.old},
            thought="\n".join([*thought, "Wrong:", f"{mutant.line}|{mutant.new}"]),
        ),
        OracleAction(name="submit"),
    ]  # fmt: skip
    unseen = {"shell"} if task.hidden is not None else set()
    return tuple(a for a in actions if a.name not in unseen and (not task.tools or a.name in task.tools))


def _head(source: str, line: int) -> list[int]:
    """The line number of the head of the innermost function around a line; none outside functions."""
    around = [
        node.lineno
        for node in ast.walk(parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno < line <= (node.end_lineno or node.lineno)
    ]
    return [max(around)] if around else []


def _prompt(project: _Project, projects: Sequence[_Project]) -> str:
    """The run's prompt if it is about no single bug, else the one fact that is known: the check fails. Two
    runs with one prompt that changed different files, and passed, show that it describes neither change."""
    said, changed = project.run.task.prompt, project.changed
    if any(p.run.task.prompt == said and p.changed and not p.changed & changed for p in projects if changed):
        return said
    failing = "A hidden check" if project.run.task.hidden else f"`{project.command}`"
    return f"{failing} fails. Find the bug and fix it."
