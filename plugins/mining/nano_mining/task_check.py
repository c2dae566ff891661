"""The checks of a task: its oracle earns 1, doing nothing earns 0, and its hidden checks detect mistakes.

The oracle is run by the runtime in the sandbox, and every verdict is from the grader that training uses.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.grading.grade import grade_trajectory
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, run_task, run_without_turns
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_graders.solution_use import live_use
from nano_mining.mutation_testing import MutantReport, NoMutants, run_mutants
from nano_rl.gather.rollouts import ORACLE, PluginsOff, oracle_policy, run_in_project
from nano_shared import snapshot
from nano_shared.errors import SandboxError, UsageError
from nano_shared.files import content_hash, in_memory, scratch_folder
from nano_shared.hidden_checks import Case, CaseChecks, MutantChecks, SuiteChecks
from nano_shared.process import SAFE_PATH, safe_workers
from nano_shared.snapshot import BlobStore, open_blobs
from nano_shared.store import LogStore
from nano_shared.types import Split, StopReason, Task, Trajectory, Verdict

LONG_ENOUGH = 24
"""length from which a line of a hidden file that is also shown counts as leaked"""


def leaks(task: Task) -> list[str]:
    """Hidden content that the task shows, one sentence each."""
    hidden = task.hidden
    texts = (task.prompt, task.check or "", *task.files.values())
    found = []
    if isinstance(hidden, CaseChecks):
        squeezed = [_squeezed(text) for text in texts]
        calls = [call_of(hidden.entry_point, c) for c in hidden.cases if c.args or c.kwargs]
        shown = [call for call in calls if any(_squeezed(call) in text for text in squeezed)]
        if shown:
            found.append(f"{len(shown)} of {len(calls)} hidden cases are shown, {shown[0]} first")
    if isinstance(hidden, MutantChecks) and any(source in texts for source in hidden.mutants.values()):
        found.append("a mutant lies in the workspace as a whole")
    if isinstance(hidden, SuiteChecks) and (line := _line_in(list(hidden.suite.files.values()), texts)):
        found.append(f"a line of a hidden test file is shown: {line[:80]}")
    return found


def call_of(entry_point: str, case: Case) -> str:
    """A case as the text of its call."""
    parts = [*map(repr, case.args), *(f"{k}={v!r}" for k, v in case.kwargs.items())]
    return f"{entry_point}({', '.join(parts)})"


def _squeezed(text: str) -> str:
    """The text without whitespace, with single quotes only."""
    return re.sub(r"\s+", "", text).replace('"', "'")


def _line_in(sources: list[str], texts: tuple[str, ...]) -> str | None:
    shown = {line.strip() for text in texts for line in text.split("\n")}
    lines = (line.strip() for source in sources for line in source.split("\n"))
    usual = ("import ", "from ", "#", "def ", "class ")
    telling = (line for line in lines if len(line) >= LONG_ENOUGH and not line.startswith(usual))
    return next((line for line in telling if line in shown), None)


REPEATS = 3
FIRST = 4
"""number of hidden cases that the starting files are graded on first"""
SLOW = "agent_timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinding:
    """The results of the checks of one task."""

    key: str
    level: int | None
    view: str | None
    checks: dict[str, str]
    """check -> "pass", "skip: reason", or the problem"""
    kill_rate: float | None = None
    """share of the mutants that the hidden cases kill"""
    seconds: float = 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why the task is not admitted; empty if it is."""
        failed = ((name, said) for name, said in self.checks.items() if said != "pass")
        return tuple(f"{name}: {said}" for name, said in failed if not said.startswith("skip: "))

    @property
    def admitted(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key, "level": self.level, "view": self.view, "admitted": self.admitted,
            "reasons": list(self.reasons), "checks": self.checks, "kill_rate": self.kill_rate,
            "seconds": round(self.seconds, 4),
        }  # fmt: skip


class _Notes(dict[str, str]):
    """Check -> "pass", "skip: reason", or the problem."""

    def note(self, name: str, problem: str | None) -> bool:
        """Record a check; returns True if it passed."""
        self[name] = problem or "pass"
        return problem is None


def check_task(task: Task, runtime: Runtime) -> TaskFinding:
    """Run all checks of one task. The policy of `runtime` is not used. Expensive checks are skipped after a
    failure that makes them pointless."""
    started, notes, kill_rate = time.monotonic(), _Notes(), None
    if _readable(task, notes) and _nothing_is_nothing(task, runtime, notes):
        run = _oracle(task, runtime, notes)
        if run is not None:
            found = _mutation_testing(task, run, runtime, notes)
            kill_rate = found.rate if found is not None else None
            if found is not None and found.stable:
                notes.note("repeats", None)
            else:
                _repeats(run, runtime, notes)
    return TaskFinding(
        key=task.key, level=task.level, view=task.view, checks=notes, kill_rate=kill_rate,
        seconds=time.monotonic() - started,
    )  # fmt: skip


def _readable(task: Task, notes: _Notes) -> bool:
    """The checks that run nothing: the task has a check and an oracle, and shows no hidden content."""
    checked = task.hidden is not None or task.check is not None
    fine = notes.note("checks", None if checked else "the task has no check to be graded by")
    lacking = None if task.oracle else "the task has no oracle to show that it can be solved"
    fine &= notes.note("oracle", lacking)
    return notes.note("leaks", "; ".join(leaks(task)) or None) and fine


def _nothing_is_nothing(task: Task, runtime: Runtime, notes: _Notes) -> bool:
    """The unchanged starting files, and an empty submission, must earn 0."""
    if task.tools is not None and "submit" not in task.tools:
        notes["starter"] = notes["no_op"] = "skip: the task offers no submit"
        return True
    try:
        starter = run_without_turns(task, runtime)
    except UsageError as problem:
        return notes.note("starter", str(problem))
    empty = starter.model_copy(update={"answer": "", "stop": StopReason.FINISHED})
    verdict = _grade_start(starter, runtime)
    if verdict is not None and verdict.failure_kind == SLOW:
        notes.note("starter", "the starting files do not end on some case, nor would their check")
        return False
    fine = notes.note("starter", _not_zero(verdict))
    by_answer = task.hidden is not None and task.hidden.kind in ("answer", "state")
    fine &= notes.note("no_op", _not_zero(_grade(empty, runtime) if by_answer else verdict))
    return fine


def _grade_start(run: Trajectory, runtime: Runtime) -> Verdict | None:
    """The verdict on the starting files; if the first hidden cases fail, the others are not run."""
    hidden = run.task.hidden
    if isinstance(hidden, CaseChecks) and len(hidden.cases) > FIRST:
        few = hidden.model_copy(update={"cases": hidden.cases[:FIRST]})
        task = run.task.model_copy(update={"hidden": few})
        verdict = _grade(run.model_copy(update={"task": task}), runtime)
        if _reward(verdict) == 0:
            return verdict
    return _grade(run, runtime)


def _not_zero(verdict: Verdict | None) -> str | None:
    if verdict is None or verdict.reward is None:
        return f"could not be graded: {verdict.failure_kind if verdict else 'no check'}"
    return None if verdict.reward == 0 else f"earns {verdict.reward:g} instead of 0"


def _grade(run: Trajectory, runtime: Runtime) -> Verdict | None:
    return grade_trajectory(run, runtime.sandbox, runtime.store.blobs)


def _oracle(task: Task, runtime: Runtime, notes: _Notes) -> Trajectory | None:
    """The oracle's run if it earns 1, else None."""
    try:
        *earlier, run = _oracle_runs(task, runtime)
    except UsageError as problem:
        notes.note("oracle", str(problem))
        return None
    verdict = _grade(run, runtime)
    wrong = next(((one, one.verdict) for one in earlier if one.reward != 1), None)
    wrong = (run, verdict) if _reward(verdict) != 1 else wrong
    return run if notes.note("oracle", _shortfall(*wrong) if wrong else None) else None


def _oracle_runs(task: Task, runtime: Runtime) -> list[Trajectory]:
    if not task.earlier:
        return [run_task(task, replace(runtime, policy=oracle_policy(task, runtime.profile)))]
    return run_in_project(task, runtime, policy_of=lambda one: oracle_policy(one, runtime.profile))


def _repeats(run: Trajectory, runtime: Runtime, notes: _Notes) -> None:
    """The oracle's result must earn 1 each time that it is graded, in a new jail."""
    rewards = [_reward(_grade(run, runtime)) for _ in range(REPEATS - 1)]
    why = f"the oracle's result does not earn 1 every time: {[1, *rewards]}"
    notes.note("repeats", None if set(rewards) == {1} else why)


def _reward(verdict: Verdict | None) -> float | None:
    return verdict.reward if verdict is not None else None


def _shortfall(run: Trajectory, verdict: Verdict | None) -> str:
    if verdict is None or verdict.reward is None:
        return f"could not be graded: {verdict.failure_kind if verdict else 'no check'}"
    failed = [name for name, state in verdict.checks.items() if state != "pass"]
    detail = f"; stopped: {run.stop}" + (f"; {failed[0]} and {len(failed) - 1} more fail" if failed else "")
    return f"earns {verdict.reward:g} instead of 1{detail}"


def _mutation_testing(task: Task, run: Trajectory, runtime: Runtime, notes: _Notes) -> MutantReport | None:
    """What mutants of the oracle's solution say of the hidden cases; None where they say nothing."""
    hidden = task.hidden
    if isinstance(hidden, SuiteChecks) and (use := live_use(hidden.suite, (*task.artifacts, "")[0])):
        notes["apart"] = f"skip: {use}, so work may be graded beside its tests (trust strict)"
    if not isinstance(hidden, CaseChecks):
        kind = hidden.kind if hidden is not None else "command"
        notes["mutants"] = f"skip: a check of kind {kind} has no program to mutate"
        return None
    try:
        found = run_mutants(task, _solution(task, run, runtime), runtime.sandbox, times=REPEATS - 1)
    except SandboxError as problem:
        notes.note("mutants", f"mutation testing failed: {problem}")
        return None
    except NoMutants as problem:
        notes["mutants"] = f"skip: {problem}"
        return None
    notes.note("mutants", found.weakness)
    return found


def _solution(task: Task, run: Trajectory, runtime: Runtime) -> Mapping[str, str]:
    """The text artifacts that the oracle left, by path."""
    tree = snapshot.load(str(run.last_snapshot), runtime.store.blobs)
    files = {}
    for name in task.artifacts:
        entry = tree.by_path.get(name)
        if entry is not None and entry.content is not None:
            files[name] = runtime.store.blobs.get(str(entry.content)).decode("utf-8", "replace")
    return files


def log_folder() -> AbstractContextManager[Path]:
    return scratch_folder("check", in_memory())


def scratch_runtime(
    folder: Path, blobs: BlobStore | str | Path | None = None, opener: Callable[[], Sandbox] = open_sandbox
) -> Runtime:
    """A runtime with its own log in `folder`; `blobs` are those of the log whose snapshots tasks start
    from, or their address, and `opener` opens its sandbox."""
    log = tempfile.mkdtemp(prefix=f"check-{os.getpid()}-", dir=folder)
    store = LogStore.open(Path(log) / "log.db")
    if blobs is not None:
        shared = blobs if isinstance(blobs, BlobStore) else open_blobs(blobs)
        store = LogStore(store.database, _SharedBlobs(store.blobs.root, shared))
    sandbox = PluginsOff(opener())
    policy = ScriptedPolicy([])
    return Runtime(policy=policy, sandbox=sandbox, store=store, profile=COMPACT_1, policy_name=ORACLE)


class _SharedBlobs(BlobStore):
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
) -> Generator[tuple[Task, TaskFinding]]:
    """Each task with its finding, in order. `tasks` may be infinite; it is read a few tasks ahead. `blobs`
    are those of the log whose snapshots tasks start from, `opener` opens the sandbox. One job runs in this
    process, several in worker processes."""
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
    """Refuse repeated problems (same prompt and files), and programs that occur in another split. `others`
    maps hashes of programs that must not occur to their origin."""
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
    """(the first `n` admitted candidates, all findings up to the last of them). A smaller `n` gives a prefix.
    Raises UsageError if PATIENCE candidates in a row are refused."""
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
        stream.close()
    return kept, findings


def programs_of(tasks: Sequence[Task], source: str) -> dict[str, str]:
    return {t.program_hash: f"{t.key} of {source}" for t in tasks if t.program_hash is not None}
