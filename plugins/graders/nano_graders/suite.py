"""Hidden test suites: in two jails where plain values carry the calls, else beside the solution in one."""

from __future__ import annotations

from nano_coder.grading.grade import reference_files
from nano_coder.grading.hidden_cases import GradingOutcome, Submission
from nano_coder.sandbox.protocol import Sandbox
from nano_graders.one_process_suite import run_strict
from nano_graders.solution_use import live_use
from nano_graders.two_jail_suite import Job, NeedsStrict, of_reference, run_suite
from nano_shared.hidden_checks import SuiteChecks
from nano_shared.types import Limits


def grade_suite(given: Submission) -> GradingOutcome:
    """The outcome of the hidden tests on the first artifact. Raises SandboxError if a jail fails."""
    task, checks, sandbox = given.task, given.checks, given.sandbox
    assert isinstance(checks, SuiteChecks)
    suite = checks.suite
    job = Job(suite, task.artifacts[0], given.files, task.files, reference_files(task))
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
