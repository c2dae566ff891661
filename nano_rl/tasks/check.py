"""The checks of a task: its oracle earns 1, doing nothing earns 0, and its hidden checks detect mistakes.

The oracle is run by the runtime in the sandbox, and every verdict is from the grader that training uses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nano_coder.grading.grade import grade_trajectory
from nano_coder.grading.live_use import live_use
from nano_coder.run.execution import Runtime, run_task, run_without_turns
from nano_rl.tasks.attempts import oracle_policy, run_in_project
from nano_rl.tasks.mutation_testing import KILLED, MutantReport, NoMutants, run_mutants
from nano_shared import snapshot
from nano_shared.errors import SandboxError, UsageError
from nano_shared.hidden_checks import Case, CaseChecks, MutantChecks, SuiteChecks, WorkspaceChecks
from nano_shared.types import StopReason, Task, Trajectory, Verdict

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
    for line in (line.strip() for source in sources for line in source.split("\n")):
        telling = len(line) >= LONG_ENOUGH and not line.startswith(
            ("import ", "from ", "#", "def ", "class ")
        )
        if telling and line in shown:
            return line
    return None


_OURS = "nano"
"""what the names of our own generators begin with: they run the oracle when they make a task"""


def unproven(tasks: Iterable[Task]) -> list[Task]:
    """The tasks whose tests are programs and whose oracle was never run: a right answer may earn nothing."""
    return [
        task
        for task in tasks
        if isinstance(task.hidden, SuiteChecks | WorkspaceChecks | MutantChecks)
        and task.provenance.checked is None
        and not (task.provenance.generator or "").startswith(_OURS)
    ]


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
        return tuple(
            f"{name}: {said}"
            for name, said in self.checks.items()
            if said != "pass" and not said.startswith("skip: ")
        )

    @property
    def admitted(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key, "level": self.level, "view": self.view, "admitted": self.admitted,
            "reasons": list(self.reasons), "checks": self.checks, "kill_rate": self.kill_rate,
            "seconds": round(self.seconds, 4),
        }  # fmt: skip


@dataclass(slots=True)
class _Notes:
    """Collects the results of checks."""

    checks: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, problem: str | None) -> bool:
        """Record a check; returns True if it passed."""
        self.checks[name] = problem or "pass"
        return problem is None


def check_task(task: Task, runtime: Runtime) -> TaskFinding:
    """Run all checks of one task. The policy of `runtime` is not used.

    Expensive checks are skipped after a failure that makes them pointless.
    """
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
        key=task.key, level=task.level, view=task.view, checks=notes.checks, kill_rate=kill_rate,
        seconds=time.monotonic() - started,
    )  # fmt: skip


def _readable(task: Task, notes: _Notes) -> bool:
    """The checks that run nothing: the task has a check and an oracle, and shows no hidden content."""
    checked = task.hidden is not None or task.check is not None
    fine = notes.note("checks", None if checked else "the task has no check to be graded by")
    fine &= notes.note(
        "oracle", None if task.oracle else "the task has no oracle to show that it can be solved"
    )
    found = leaks(task)
    fine &= notes.note("leaks", "; ".join(found) or None)
    return fine


def _nothing_is_nothing(task: Task, runtime: Runtime, notes: _Notes) -> bool:
    """The unchanged starting files, and an empty submission, must earn 0."""
    if task.tools is not None and "submit" not in task.tools:
        notes.checks["starter"] = notes.checks["no_op"] = "skip: the task offers no submit"
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
    if not notes.note("oracle", _shortfall(*wrong) if wrong else None):
        return None
    return run


def _oracle_runs(task: Task, runtime: Runtime) -> list[Trajectory]:
    """The oracle's run, behind those of earlier tasks of its project."""
    if not task.earlier:
        return [run_task(task, replace(runtime, policy=oracle_policy(task, runtime.profile)))]
    return run_in_project(task, runtime, policy_of=lambda one: oracle_policy(one, runtime.profile))


def _repeats(run: Trajectory, runtime: Runtime, notes: _Notes) -> None:
    """The oracle's result must earn 1 each time that it is graded, in a new jail."""
    rewards = [_reward(_grade(run, runtime)) for _ in range(REPEATS - 1)]
    agree = set(rewards) == {1}
    notes.note(
        "repeats", None if agree else f"the oracle's result does not earn 1 every time: {[1, *rewards]}"
    )


def _reward(verdict: Verdict | None) -> float | None:
    return verdict.reward if verdict is not None else None


def _shortfall(run: Trajectory, verdict: Verdict | None) -> str:
    if verdict is None or verdict.reward is None:
        return f"could not be graded: {verdict.failure_kind if verdict else 'no check'}"
    failed = [name for name, state in verdict.checks.items() if state != "pass"]
    detail = f"; stopped: {run.stop}" + (f"; {failed[0]} and {len(failed) - 1} more fail" if failed else "")
    return f"earns {verdict.reward:g} instead of 1{detail}"


def _mutation_testing(task: Task, run: Trajectory, runtime: Runtime, notes: _Notes) -> MutantReport | None:
    """The report of the mutants, if the task has a program to mutate, else None."""
    hidden = task.hidden
    if isinstance(hidden, SuiteChecks) and (use := live_use(hidden.suite, (*task.artifacts, "")[0])):
        notes.checks["apart"] = f"skip: {use}, so work may be graded beside its tests (trust strict)"
    if not isinstance(hidden, CaseChecks):
        kind = hidden.kind if hidden is not None else "command"
        notes.checks["mutants"] = f"skip: a check of kind {kind} has no program to mutate"
        return None
    try:
        found = run_mutants(task, _solution(task, run, runtime), runtime.sandbox, times=REPEATS - 1)
    except NoMutants as problem:
        notes.checks["mutants"] = f"skip: {problem}"
        return None
    except SandboxError as problem:
        notes.note("mutants", f"mutation testing failed: {problem}")
        return None
    notes.note("mutants", _weakness(found))
    return found


def _weakness(found: MutantReport) -> str | None:
    if found.hollow:
        return f"a hollow solution passes: {found.hollow[0]}"
    if found.rate is not None and found.rate < KILLED:
        return f"{found.rate:.0%} of the mutants die, {KILLED:.0%} must; alive: {found.survived[0]}"
    return None


def _solution(task: Task, run: Trajectory, runtime: Runtime) -> Mapping[str, str]:
    """The text artifacts that the oracle left, by path."""
    tree = snapshot.load(str(run.last_snapshot), runtime.store.blobs)
    files = {}
    for name in task.artifacts:
        entry = tree.by_path.get(name)
        if entry is not None and entry.content is not None:
            files[name] = runtime.store.blobs.get(str(entry.content)).decode("utf-8", "replace")
    return files
