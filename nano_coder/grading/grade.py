"""The verdict on what an agent left behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from nano_coder.grading.answer import same_answer
from nano_coder.grading.cases import Outcome, names, run_cases
from nano_coder.grading.metric import keep_bounds
from nano_coder.grading.mutants import REFERENCE, killed, run_mutants
from nano_coder.grading.scorer import grade_score
from nano_coder.grading.state import run_state, state_files
from nano_coder.grading.strict import run_strict
from nano_coder.grading.suite import Job, NeedsStrict, run_suite
from nano_coder.grading.table import read_table, run_table
from nano_coder.grading.version import GRADER
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError, UsageError
from nano_shared.hashing import content_hash
from nano_shared.types import HiddenChecks, Task, Trust, Verdict

LARGEST_ARTIFACT = 1 << 20

__all__ = ["GRADER", "LARGEST_ARTIFACT", "grade"]


def grade(
    task: Task,
    *,
    files: Mapping[str, bytes],
    answer: str | None,
    sandbox: Sandbox,
    others: Collection[str] = (),
) -> Verdict:
    """Judge a task by its hidden checks of every kind that needs no whole workspace.

    `files` are the artifacts that the agent left, by their path in the workspace; `others` are the paths of
    what else it left, which is no regular file. The reward is 1.0 where every check passes, else 0.0; it is
    None, with the failure kind "verifier_error", where we failed and not the policy.
    Raises UsageError for a task without hidden checks, and for one that a command grades.
    """
    hidden = task.hidden
    if hidden is None:
        raise UsageError(f"task {task.key!r} has no hidden checks; grade its check with grade_command")
    if hidden.kind == "answer":
        return _grade_answer(hidden, answer) if hidden.scorer is None else grade_score(task, answer, sandbox)
    if hidden.kind == "cases":
        return _grade_artifacts(task, files, sandbox, names(hidden.cases), _run_cases)
    if hidden.kind == "suite":
        return _grade_artifacts(task, files, sandbox, ["tests"], _run_suite)
    if hidden.kind == "mutants":
        checks = [REFERENCE, *(f"killed_{name}" for name in hidden.mutants)]
        return _grade_artifacts(task, files, sandbox, checks, _run_mutants)
    if hidden.kind == "state":
        return _grade_state(task, files, others, answer, sandbox)
    raise UsageError(f"task {task.key!r} is graded by a command, which needs the whole workspace")


def _grade_answer(hidden: HiddenChecks, answer: str | None) -> Verdict:
    right = same_answer(answer, hidden.answer)
    return Verdict(
        reward=float(right),
        components={"tests": float(right)},
        checks={"answer": "pass" if right else "fail"},
        failure_kind="no_answer" if answer is None else None,
        trust=Trust.HIDDEN,
        grader=GRADER,
        graded_hash=content_hash(["answer", answer]),
    )


def _grade_state(
    task: Task, files: Mapping[str, bytes], others: Collection[str], answer: str | None, sandbox: Sandbox
) -> Verdict:
    assert task.hidden is not None
    wanted = {name: files[name] for name in state_files(task.hidden.state) if name in files}
    digest = content_hash([answer, [[name, content_hash(data)] for name, data in sorted(wanted.items())]])
    try:
        outcome = run_state(task.hidden, wanted, others, answer, task.limits, sandbox)
    except SandboxError:
        return Verdict(
            reward=None,
            components={"tests": None},
            failure_kind="verifier_error",
            trust=Trust.NONE,
            grader=GRADER,
            graded_hash=digest,
        )
    return Verdict(
        reward=float(outcome.passed == 1.0),
        components={"tests": outcome.passed},
        checks=outcome.checks,
        tampering=outcome.tampering,
        failure_kind=outcome.failure_kind,
        trust=Trust.HIDDEN,
        grader=GRADER,
        graded_hash=digest,
    )


def _run_cases(task: Task, files: Mapping[str, bytes], sandbox: Sandbox) -> Outcome:
    assert task.hidden is not None
    outcome = run_cases(task.hidden, files, task.artifacts[0], task.limits, sandbox)
    if not task.hidden.metrics:
        return outcome
    return keep_bounds(outcome, task.hidden.metrics, files, task.limits, sandbox)


def _run_mutants(task: Task, files: Mapping[str, bytes], sandbox: Sandbox) -> Outcome:
    assert task.hidden is not None
    return run_mutants(task, task.hidden, files, sandbox)


def _components(hidden: HiddenChecks, outcome: Outcome) -> dict[str, float | None]:
    """Scores by name: of the mutants, of the bounds, and of everything else together."""
    if hidden.kind == "mutants":
        return {"mutants_killed": killed(outcome)}
    bounds = {name: state for name, state in outcome.checks.items() if name.startswith("metric_")}
    tests = [state == "pass" for name, state in outcome.checks.items() if name not in bounds]
    return {"tests": sum(tests) / len(tests), **{name: float(s == "pass") for name, s in bounds.items()}}


def _run_suite(task: Task, files: Mapping[str, bytes], sandbox: Sandbox) -> Outcome:
    assert task.hidden is not None
    assert task.hidden.suite is not None
    job = Job(task.hidden.suite, task.artifacts[0], files, task.files, _reference(task))
    table = read_table(job.suite, job.target)
    if table is not None and (outcome := run_table(job, table, task.limits, sandbox)) is not None:
        return outcome
    return (run_strict if job.suite.strict else run_suite)(job, task.limits, sandbox)


def _reference(task: Task) -> dict[str, bytes] | None:
    """The artifacts as the task's oracle writes them, where it writes them whole."""
    texts = {str(a.arguments.get("path")): a.arguments.get("content") for a in task.oracle or ()}
    written = {path: text.encode() for path, text in texts.items() if isinstance(text, str)}
    return {path: written[path] for path in task.artifacts} if written.keys() >= set(task.artifacts) else None


def _grade_artifacts(
    task: Task,
    files: Mapping[str, bytes],
    sandbox: Sandbox,
    checks: list[str],
    run: Callable[[Task, Mapping[str, bytes], Sandbox], Outcome],
) -> Verdict:
    """Judge the artifacts by running them; `checks` are named where there is nothing to run."""
    if not task.artifacts:
        raise UsageError(f"task {task.key!r} has tests but no artifact that could answer them")
    graded = {name: files[name] for name in task.artifacts if name in files}
    digest = content_hash([[name, content_hash(data)] for name, data in sorted(graded.items())])
    missing = [name for name in task.artifacts if name not in graded]
    too_large = [name for name, data in graded.items() if len(data) > LARGEST_ARTIFACT]
    if missing or too_large:
        return Verdict(
            reward=0.0,
            components={"mutants_killed" if task.hidden and task.hidden.mutants else "tests": 0.0},
            checks=dict.fromkeys(checks, "error"),
            failure_kind="no_artifact" if missing else "artifact_too_large",
            trust=Trust.HIDDEN,
            grader=GRADER,
            graded_hash=digest,
        )
    try:
        outcome = run(task, graded, sandbox)
    except SandboxError as error:
        return Verdict(
            reward=None,
            components={"tests": None},
            failure_kind="needs_strict" if isinstance(error, NeedsStrict) else "verifier_error",
            trust=Trust.NONE,
            grader=GRADER,
            graded_hash=digest,
        )
    assert task.hidden is not None
    strict = task.hidden is not None and task.hidden.suite is not None and task.hidden.suite.strict
    return Verdict(
        reward=float(outcome.right),
        components=_components(task.hidden, outcome),
        checks=outcome.checks,
        tampering=outcome.tampering,
        failure_kind=outcome.failure_kind,
        trust=Trust.STRICT if strict else outcome.trust,
        grader=GRADER,
        graded_hash=digest,
    )
