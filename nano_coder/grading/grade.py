"""Grades a task by its hidden checks: cases, test suites, mutants, end states and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path

from nano_coder.grading.answer_equality import same_answer
from nano_coder.grading.assertion_table import read_table, run_table
from nano_coder.grading.cases import GradingOutcome, names, run_cases
from nano_coder.grading.end_state import run_state, state_files
from nano_coder.grading.graders import GRADER, Decider, trust_of
from nano_coder.grading.live_use import live_use
from nano_coder.grading.mutant_check import REFERENCE, killed, run_mutants
from nano_coder.grading.one_process_suite import run_strict
from nano_coder.grading.reasoning_gym_scorer import AnswerScore, score_answer
from nano_coder.grading.two_jail_suite import Job, NeedsStrict, of_reference, run_suite
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import LogError, SandboxError, UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import (
    AnswerChecks,
    ArtifactChecks,
    CaseChecks,
    EnvironmentChecks,
    Metric,
    MutantChecks,
    StateChecks,
    Suite,
    SuiteChecks,
    WorkspaceChecks,
)
from nano_shared.printable import printable
from nano_shared.types import Limits, Tampering, Task, Verdict

_MEASURE = Path(__file__).with_name("source_measure.py").read_text(encoding="utf-8")
_SECONDS = 20.0


def measure(files: Mapping[str, bytes], limits: Limits, sandbox: Sandbox) -> dict[str, int] | None:
    """The metrics of all Python files together, and the number of ways to run code that the syntax tree hides
    (`hidden`).

    None if a file is not valid Python. The source is parsed in a jail, since it may crash the parser. Raises
    SandboxError if the jail fails.
    """
    texts = {
        name: data.decode("utf-8", "surrogateescape") for name, data in files.items() if name.endswith(".py")
    }
    with closing(sandbox.open(None, limits)) as jail:
        result = jail.run_python(_MEASURE, isolated=True, stdin=json.dumps(texts).encode(), timeout=_SECONDS)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        if result.signal is None and not result.timed_out:
            raise SandboxError(f"the source was not measured: {result.stderr[-300:]!r}") from None
        return None  # it crashed the parser
    return {str(name): int(value) for name, value in found.items()} if found is not None else None


def keep_bounds(
    outcome: GradingOutcome,
    bounds: tuple[Metric, ...],
    files: Mapping[str, bytes],
    limits: Limits,
    sandbox: Sandbox,
) -> GradingOutcome:
    """The outcome with a check for each bound on a metric. Hiding code in strings is reported as
    tampering."""
    found = measure(files, limits, sandbox)
    checks = dict(outcome.checks)
    for bound in bounds:
        kept = found is not None and found[bound.name] <= bound.at_most
        checks[f"metric_{bound.name}"] = "pass" if kept else "error" if found is None else "fail"
    tampering = outcome.tampering
    if found is not None and found["hidden"] and "hidden_code" not in {finding.kind for finding in tampering}:
        detail = "the source runs code that no syntax tree shows, or reaches for what does"
        tampering = (*tampering, Tampering(kind="hidden_code", detail=detail))
    return GradingOutcome(checks, tampering, outcome.failure_kind)


LARGEST_ARTIFACT = 1 << 20
_ATTEMPTS = 2
_LONGEST_DETAIL = 500
_MOST_FINDINGS = 50


def grade(
    task: Task,
    *,
    files: Mapping[str, bytes],
    answer: str | None,
    sandbox: Sandbox,
    others: Collection[str] = (),
) -> Verdict:
    """Grade a task by its hidden checks, of every kind that does not need the whole workspace.

    `files` are the artifacts that the agent left, by path; `others` are paths that are no regular files. The
    reward is 1.0 if every check passes, else 0.0; it is None, with failure kind "verifier_error" and the
    reason, if we failed and not the policy. Raises UsageError for a task without hidden checks, and for one
    that a command grades.
    """
    hidden = task.hidden
    if hidden is None:
        raise UsageError(f"task {task.key!r} has no hidden checks; grade its check with grade_command")
    if isinstance(hidden, WorkspaceChecks):
        raise UsageError(f"task {task.key!r} is graded by a command, which needs the whole workspace")
    if isinstance(hidden, EnvironmentChecks):
        raise UsageError(f"task {task.key!r} is graded by its environment, at the end of a run in it")
    known = _reference(task)
    start = {name: task.files.get(name, "").encode("utf-8", "surrogatepass") for name in graded_files(task)}
    return decided(
        lambda: _grade(task, hidden, files, others, answer, sandbox),
        lambda: _grade(task, hidden, known or start, (), "", sandbox),
        graded_hash=graded_hash(task, files, answer),
    )


def decided(attempt: Callable[[], Verdict], control: Callable[[], Verdict], *, graded_hash: str) -> Verdict:
    """The verdict of an attempt. The only place that turns exceptions of grading into a verdict.

    If grading fails twice, but works for the `control`, what the agent left caused the failure: reward 0. If
    it fails for the control too, we or the task failed: reward None. Raises UsageError if the control does,
    and LogError, which no policy can cause.
    """
    for _ in range(_ATTEMPTS):
        found = _tried(attempt)
        if isinstance(found, Verdict):
            return shortened(found)
    kind, why = "verifier_error", printable(str(found)[:_LONGEST_DETAIL])
    without = _tried(control)
    if isinstance(without, UsageError):
        raise without
    if isinstance(without, Exception) or without.reward is None:
        return ungraded(kind, why, graded_hash)
    what = f"grading failed twice on what was left, and not without it: {type(found).__name__}: {why}"
    return without.model_copy(
        update={
            "reward": 0.0,
            "components": {name: 0.0 for name in without.components},
            "checks": dict.fromkeys(without.checks, "error"),
            "tampering": (Tampering(kind="jail", detail=what),),
            "failure_kind": "sandbox_broken",
            "graded_hash": graded_hash,
        }
    )


def shortened(verdict: Verdict) -> Verdict:
    """The verdict with at most `_MOST_FINDINGS` findings of bounded length: an agent may cause any number of
    them."""
    findings, kept = verdict.tampering, verdict.tampering[:_MOST_FINDINGS]
    if all(len(found.detail) <= _LONGEST_DETAIL for found in kept) and len(kept) == len(findings):
        return verdict
    short = [found.model_copy(update={"detail": found.detail[:_LONGEST_DETAIL]}) for found in kept]
    if left := len(findings) - len(kept):
        short.append(Tampering(kind=findings[-1].kind, detail=f"and {left} more findings"))
    return verdict.model_copy(update={"tampering": tuple(short)})


def _tried(attempt: Callable[[], Verdict]) -> Verdict | Exception:
    try:
        return attempt()
    except LogError:
        raise
    except Exception as error:  # what a policy left may raise anything; `decided` finds the cause
        return error


def ungraded(kind: str, detail: str = "", graded_hash: str = content_hash("")) -> Verdict:
    """The verdict if grading failed for reasons other than the policy."""
    return Verdict(
        reward=None,
        components={"tests": None},
        failure_kind=f"{kind}: {detail}" if detail else kind,
        trust=trust_of(Decider.NOBODY),
        grader=GRADER,
        graded_hash=graded_hash,
    )


def graded_files(task: Task) -> tuple[str, ...]:
    """Paths of the files that a verdict depends on; empty if it depends on the whole workspace."""
    if isinstance(task.hidden, StateChecks):
        return state_files(task.hidden.state)
    return task.artifacts if isinstance(task.hidden, ArtifactChecks) else ()


def graded_hash(task: Task, files: Mapping[str, bytes], answer: str | None) -> str:
    """Hash of the files and the answer that a verdict depends on."""
    if isinstance(task.hidden, AnswerChecks):
        return content_hash(["answer", answer])
    names = sorted(name for name in graded_files(task) if name in files)
    hashes = [[name, content_hash(files[name])] for name in names]
    return content_hash([answer, hashes] if isinstance(task.hidden, StateChecks) else hashes)


def _grade(
    task: Task,
    hidden: AnswerChecks | StateChecks | ArtifactChecks,
    files: Mapping[str, bytes],
    others: Collection[str],
    answer: str | None,
    sandbox: Sandbox,
) -> Verdict:
    """Grade once. Raises whatever goes wrong."""
    if isinstance(hidden, AnswerChecks):
        return _grade_answer(hidden, answer, sandbox)
    wanted = {name: files[name] for name in graded_files(task) if name in files}
    if isinstance(hidden, StateChecks):
        outcome = run_state(hidden, wanted, others, answer, task.limits, sandbox)
    else:
        outcome = _run_artifacts(task, hidden, wanted, sandbox)
    return Verdict(
        reward=float(outcome.right),
        components=_components(hidden, outcome),
        checks=outcome.checks,
        tampering=outcome.tampering,
        failure_kind=outcome.failure_kind,
        trust=outcome.trust,
        grader=GRADER,
        graded_hash=graded_hash(task, files, answer),
    )


def _grade_answer(hidden: AnswerChecks, answer: str | None, sandbox: Sandbox) -> Verdict:
    if hidden.scorer is None:
        score = AnswerScore(float(same_answer(answer, hidden.answer)))
    else:
        score = score_answer(answer, hidden.answer, hidden.scorer, sandbox)
    right = score.value >= 1 - 1e-9
    return Verdict(
        reward=float(right),
        components={"tests": score.value},
        checks={"answer": "pass" if right else "fail"},
        tampering=score.tampering,
        failure_kind="no_answer" if answer is None else score.failure_kind,
        trust=trust_of(Decider.APART),
        grader=GRADER,
        graded_hash=content_hash(["answer", answer]),
    )


def _run_artifacts(
    task: Task, hidden: ArtifactChecks, files: Mapping[str, bytes], sandbox: Sandbox
) -> GradingOutcome:
    """The outcome of running the artifacts; errors if they are missing or too large."""
    if not task.artifacts:
        raise UsageError(f"task {task.key!r} has tests but no artifact that could answer them")
    too_large = any(len(data) > LARGEST_ARTIFACT for data in files.values())
    if too_large or len(files) < len(set(task.artifacts)):
        kind = "artifact_too_large" if len(files) == len(set(task.artifacts)) else "no_artifact"
        return GradingOutcome(dict.fromkeys(_check_names(hidden), "error"), (), kind)
    if isinstance(hidden, MutantChecks):
        return run_mutants(task, hidden, files, sandbox)
    if isinstance(hidden, SuiteChecks):
        return _run_suite(task, hidden.suite, files, sandbox)
    outcome = run_cases(hidden, files, task.artifacts[0], task.limits, sandbox)
    return keep_bounds(outcome, hidden.metrics, files, task.limits, sandbox) if hidden.metrics else outcome


def _check_names(hidden: ArtifactChecks) -> list[str]:
    if isinstance(hidden, MutantChecks):
        return [REFERENCE, *(f"killed_{name}" for name in hidden.mutants)]
    return names(hidden.cases) if isinstance(hidden, CaseChecks) else ["tests"]


def _components(hidden: StateChecks | ArtifactChecks, outcome: GradingOutcome) -> dict[str, float | None]:
    """Scores by name: mutants, bounds on metrics, and all other checks together."""
    if isinstance(hidden, MutantChecks):
        return {"mutants_killed": killed(outcome)}
    bounds = {name: state for name, state in outcome.checks.items() if name.startswith("metric_")}
    tests = [state == "pass" for name, state in outcome.checks.items() if name not in bounds]
    return {"tests": sum(tests) / len(tests), **{name: float(s == "pass") for name, s in bounds.items()}}


def _run_suite(task: Task, suite: Suite, files: Mapping[str, bytes], sandbox: Sandbox) -> GradingOutcome:
    job = Job(suite, task.artifacts[0], files, task.files, _reference(task))
    table = read_table(job.suite, job.target)
    if table is not None and (outcome := run_table(job, table, task.limits, sandbox)) is not None:
        return outcome
    if suite.strict or (live_use(suite, job.target) and not _carried(job, task.limits, sandbox)):
        return run_strict(job, task.limits, sandbox)
    try:
        return run_suite(job, task.limits, sandbox)
    except NeedsStrict:
        if _carried(job, task.limits, sandbox):
            return GradingOutcome({"tests": "error"}, (), "needs_strict")
        return run_strict(job, task.limits, sandbox)


def _carried(job: Job, limits: Limits, sandbox: Sandbox) -> bool:
    """Whether the task has a reference that passes in a pair of jails: then no work needs another grader."""

    def passes(known: Job) -> bool:
        try:
            return run_suite(known, limits, sandbox).right
        except NeedsStrict:
            return False

    return of_reference(job, "passes apart", passes)


def _reference(task: Task) -> dict[str, bytes] | None:
    """The artifacts that the task's oracle writes, if it writes all of them whole; else None."""
    texts = {str(a.arguments.get("path")): a.arguments.get("content") for a in task.oracle or ()}
    written = {path: text.encode() for path, text in texts.items() if isinstance(text, str)}
    return {path: written[path] for path in task.artifacts} if written.keys() >= set(task.artifacts) else None
