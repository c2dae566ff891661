"""Suites that need the solution's live objects: run in one hardened process with it, and trusted less.

The reports come from a process that the solution shares. They are checked against the tests that the files
define; skips count as errors; replaced functions of the test runner are reported; and a solution that passes
must fail impossible variants of the tests.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from nano_coder.grading.hidden_cases import GradingOutcome
from nano_coder.grading.impossible_tests import impossible_files, test_names
from nano_coder.sandbox.protocol import ExecResult, Sandbox
from nano_graders.two_jail_suite import (
    CPU_SECONDS,
    LONGEST_REPORT,
    WALL_SECONDS,
    Job,
    TestReport,
    jail_program,
    read_reports,
)
from nano_shared.errors import SandboxError
from nano_shared.process import parse
from nano_shared.types import Limits, Tampering, Trust


def run_strict(job: Job, limits: Limits, sandbox: Sandbox) -> GradingOutcome:
    """Run the tests beside the solution in one jail; if they pass, also impossible variants, which must fail.

    Raises SandboxError if the jail fails.
    """
    outcome = replace(_run(job, limits, sandbox), trust=Trust.STRICT)
    variants = impossible_files(job.suite.files)
    if not outcome.right or not variants:
        return outcome
    files = {**job.suite.files, **variants}
    suite = job.suite.model_copy(update={"files": files})
    control = _run(replace(job, suite=suite), limits, sandbox)
    expected = {*test_names(variants), *variants}
    passed = [name for name, state in control.checks.items() if state == "pass" and _test(name) in expected]
    if not passed:
        return outcome
    detail = f"passes {passed[0]} too where no solution can"
    return replace(
        outcome,
        checks=dict.fromkeys(outcome.checks, "error"),
        tampering=(Tampering(kind="forged", detail=detail),),
    )


def _test(name: str) -> str:
    """The test function in a check's name; of a script's check, the file."""
    return re.split(r"[.:]", name.partition("[")[0])[-1] if not name.endswith(".py") else name


def _run(job: Job, limits: Limits, sandbox: Sandbox) -> GradingOutcome:
    nonce = secrets.token_hex(16)
    given = {
        "framework": job.suite.framework, "tests": job.suite.files, "files": job.solution_files(),
        "target": job.target, "cpu_seconds": CPU_SECONDS,
    }  # fmt: skip
    with closing(sandbox.open(None, limits)) as jail:
        ended = jail.run_python(
            jail_program(f"one_process.main({nonce!r})", "framework_runners", "one_process"),
            isolated=True,
            stdin=json.dumps(given).encode(),
            timeout=WALL_SECONDS,
            output_bytes=LONGEST_REPORT,
        )
    return _judged(job, read_reports(ended.stdout, nonce), ended)


def _judged(job: Job, reports: list[TestReport], ended: ExecResult) -> GradingOutcome:
    if not reports or reports[0] != {"ready": True}:
        raise SandboxError(f"the strict runner did not start: {ended.last_words}")
    found = [
        Tampering(kind="forged", detail=f"wrote {r['forged']!r} to the channel")
        for r in reports
        if "forged" in r
    ][:1]
    reported = [(r["check"], r.get("state", "error")) for r in reports if "check" in r]
    announced = [name for r in reports for name in r.get("collected", ())]
    missing = [name for name in defined_tests(job.suite.files) if not _among(name, announced)]
    checks = {**dict.fromkeys([*announced, *missing], "error"), **dict(reported)} or {"import": "error"}
    done = next((r for r in reports if "done" in r), TestReport())
    if done.get("patched"):
        found.append(Tampering(kind="patched", detail=f"replaced {', '.join(done['patched'])}"))
    exact = done.get("done") == len(reported) == len(announced) == len(set(announced)) and not missing
    kind = None
    if not exact or any("import" in r for r in reports):
        checks = {name: "error" if state == "pass" else state for name, state in checks.items()}
    if not done:
        kind = _cause(reports[-1], ended)
        if kind in ("exit", "child_killed"):
            found.append(Tampering(kind=kind, detail=f"the strict runner was left: {reports[-1]}"))
        if kind == "agent_timeout":
            checks = {name: "timeout" if state == "error" else state for name, state in checks.items()}
    return GradingOutcome(checks, tuple(found), kind)


def _cause(last: TestReport, ended: ExecResult) -> str:
    """The failure kind if the reports are incomplete."""
    if ended.oom:
        return "memory"
    # the signal too: the kernel counts charged ticks, which on a busy host exceed the time used
    out_of_cpu = last.get("ended") == {"signal": signal.SIGXCPU}
    if ended.timed_out or out_of_cpu or last.get("cpu_s", 0.0) >= CPU_SECONDS:
        return "agent_timeout"
    if "ended" not in last:
        return "child_killed"
    return "exit" if "exit" in last["ended"] else "crash"


def _among(name: str, announced: list[str]) -> bool:
    return any(re.search(rf"(^|[.:]){re.escape(name)}(\[|$)", each) for each in announced)


def defined_tests(files: Mapping[str, str]) -> list[str]:
    """Names of the test functions in the files, except those skipped by a decorator."""
    return sorted(
        {
            node.name
            for text in files.values()
            for node in _functions(text)
            if node.name.startswith("test")
            and not any("skip" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
    )


def _functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of the module and methods of its classes."""
    try:
        tree = parse(text)
    except SyntaxError:
        return []
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [
        node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
