"""The verdict on what an agent left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nano_coder.grading.answer import same_answer
from nano_coder.grading.cases import Outcome, names, run_cases
from nano_coder.grading.strict import run_strict
from nano_coder.grading.suite import Job, NeedsStrict, run_suite
from nano_coder.grading.version import GRADER
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError, UsageError
from nano_shared.hashing import content_hash
from nano_shared.types import HiddenChecks, Task, Trust, Verdict

LARGEST_ARTIFACT = 1 << 20

__all__ = ["GRADER", "LARGEST_ARTIFACT", "grade"]


def grade(task: Task, *, files: Mapping[str, bytes], answer: str | None, sandbox: Sandbox) -> Verdict:
    """Judge a task by its hidden checks of kind "answer", "cases" or "suite".

    `files` are the artifacts that the agent left, by their path in the workspace. The reward is 1.0 where
    every check passes, else 0.0; it is None, with the failure kind "verifier_error", where we failed and not
    the policy.
    Raises UsageError for a task without hidden checks, and for one that a command grades.
    """
    hidden = task.hidden
    if hidden is None:
        raise UsageError(f"task {task.key!r} has no hidden checks; grade its check with grade_command")
    if hidden.kind == "answer":
        return _grade_answer(hidden, answer)
    if hidden.kind == "cases":
        return _grade_artifacts(task, files, sandbox, names(hidden.cases), _run_cases)
    if hidden.kind == "suite":
        return _grade_artifacts(task, files, sandbox, ["tests"], _run_suite)
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


def _run_cases(task: Task, files: Mapping[str, bytes], sandbox: Sandbox) -> Outcome:
    assert task.hidden is not None
    return run_cases(task.hidden, files, task.artifacts[0], task.limits, sandbox)


def _run_suite(task: Task, files: Mapping[str, bytes], sandbox: Sandbox) -> Outcome:
    assert task.hidden is not None
    assert task.hidden.suite is not None
    job = Job(task.hidden.suite, task.artifacts[0], files, task.files)
    return (run_strict if job.suite.strict else run_suite)(job, task.limits, sandbox)


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
            components={"tests": 0.0},
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
    right = outcome.passed == 1.0 and not outcome.tampering
    strict = task.hidden is not None and task.hidden.suite is not None and task.hidden.suite.strict
    return Verdict(
        reward=float(right),
        components={"tests": outcome.passed},
        checks=outcome.checks,
        tampering=outcome.tampering,
        failure_kind=outcome.failure_kind,
        trust=Trust.STRICT if strict else Trust.HIDDEN,
        grader=GRADER,
        graded_hash=digest,
    )
