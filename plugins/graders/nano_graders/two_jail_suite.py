"""Test suites in two jails: the tests in one, the solution in the other, with plain values between them.

Expected values, comparisons and reports are never in the solution's jail. One connection carries calls and
their results; only the tests' jail reports to this process.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from nano_coder.grading.hidden_cases import INSIDE, GradingOutcome, program
from nano_coder.grading.inside.report import Malformed, read
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox
from nano_graders.solution_use import starred, used_names
from nano_shared.errors import SandboxError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import Suite
from nano_shared.types import Limits, Tampering, Trust

CPU_SECONDS = 30
"""seconds of processor time for the solution, over all tests"""
PATIENCE = 12.0
"""seconds of wall time for one call"""
WALL_SECONDS = 180.0
LONGEST_REPORT = 16 << 20
_TESTS_LIMITS = Limits(memory_mb=2048)
_LINGER = 2.0
_OWN = Path(__file__).with_name("inside")
_SOLUTION_MODULES = (
    INSIDE / "report.py", INSIDE / "plain_values.py",
    *(_OWN / f"{name}.py" for name in ("stand_ins", "value_codec", "connection", "solution_side")),
)  # fmt: skip
"""by which a jail answers for the solution; in import order"""


def jail_program(call: str, *modules: str) -> str:
    """The program of a jail that calls a function of `inside`: of the solution's modules and these."""
    return program(call, *_SOLUTION_MODULES, *(_OWN / f"{name}.py" for name in modules))


class TestsFailed(SandboxError):
    """The tests' jail failed or did not report completely."""


class NeedsStrict(TestsFailed):
    """The tests pass the solution something that is not plain data."""


@dataclass(frozen=True, slots=True)
class Job:
    """One suite to run on one solution."""

    suite: Suite
    target: str
    """the file that the tests import"""
    artifacts: Mapping[str, bytes]
    originals: Mapping[str, str]
    """the original workspace: other files that the solution reads, and the target's original"""
    reference: Mapping[str, bytes] | None = None
    """correct artifacts, if the task has any"""

    def solution_files(self) -> dict[str, str]:
        texts = {name: data.decode("utf-8", "surrogateescape") for name, data in self.artifacts.items()}
        return {**self.originals, **texts}


def run_suite(job: Job, limits: Limits, sandbox: Sandbox) -> GradingOutcome:
    """Run the tests in a pair of jails.

    Tests see changes that the solution makes to its arguments, as in one process. A solution could therefore
    change what an expected value is computed from (`assert f(xs) == sum(xs)`). If the tests pass and an
    argument was changed, they run again with such changes kept from them. If they then fail, they passed only
    because of a change, which is right only if the reference needs the change too; without a reference the
    result is trusted less.

    Raises SandboxError if a jail fails, and its subclass NeedsStrict for a suite that cannot be run this way.
    """
    outcome, changed = _run(job, limits, sandbox)
    if not changed or not outcome.right:
        return outcome
    by_value, _ = _run(job, limits, sandbox, by_value=True)
    if by_value.right or of_reference(
        job, "needs changes", lambda known: not _run(known, limits, sandbox, by_value=True)[0].right
    ):
        return outcome
    if job.reference is None:
        return replace(outcome, trust=Trust.STRICT)
    detail = "the tests pass only since arguments were changed, and the reference needs no such change"
    return replace(
        by_value, tampering=(*by_value.tampering, Tampering(kind="changed_arguments", detail=detail))
    )


_known: dict[str, bool] = {}


def of_reference(job: Job, question: str, ask: Callable[[Job], bool]) -> bool:
    """The answer for the task's reference in place of the solution, asked once; False without a reference."""
    if job.reference is None:
        return False
    digests = {name: content_hash(data) for name, data in job.reference.items()}
    key = content_hash([question, job.suite.model_dump(), job.target, dict(job.originals), digests])
    if key not in _known:
        _known[key] = ask(replace(job, artifacts=job.reference))
    return _known[key]


def _run(
    job: Job, limits: Limits, sandbox: Sandbox, *, by_value: bool = False
) -> tuple[GradingOutcome, bool]:
    """The outcome, and whether an argument was changed."""
    nonce = secrets.token_hex(16)
    with ExitStack() as stack:
        solver = stack.enter_context(closing(sandbox.open(None, limits)))
        tester = stack.enter_context(closing(sandbox.open(None, _TESTS_LIMITS)))
        near, far = socket.socketpair()
        solution = _JailSide(solver, far, jail_program("solution_side.main()"))
        source = jail_program(f"tests_side.main({nonce!r})", "framework_runners", "tests_side")
        tests = _JailSide(tester, near, source)
        # the ends are crossed: what is written at one end is read first by the other jail
        solution.start(
            near, {"files": job.solution_files(), "target": job.target, "cpu_seconds": CPU_SECONDS}
        )
        tests.start(far, {**_tests_job(job), "by_value": by_value})
        tests.join()
        reports = read_reports(tests.result().stdout, nonce)
        outcome = _judged(reports, tests.result(), solution)
        solver.close()
        solution.join()
    return outcome, reports[-1].get("changed", False)


def _tests_job(job: Job) -> dict[str, Any]:
    files = {**job.originals, **job.suite.files}
    used = used_names(job.suite.files, job.target, files, star=not job.suite.names)
    return {
        "framework": job.suite.framework,
        "tests": job.suite.files,
        "files": files,
        "target": job.target,
        "original": job.originals.get(job.target) if job.suite.names else None,
        "tested": list(job.suite.names),
        "names": sorted({*job.suite.names, *used}),
        "starred": sorted(starred(job.suite.files, job.target, files)),
        "patience": PATIENCE,
    }


class _JailSide:
    """A program in a jail, on its own thread, at one end of the connection."""

    def __init__(self, jail: Jail, end: socket.socket, source: str) -> None:
        self._jail = jail
        self._end = end
        self._source = source
        self._ended: ExecResult | SandboxError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, writer: socket.socket, job: dict[str, Any]) -> None:
        """Start the program, and write the job to the connection's other end."""
        self._thread.start()
        data = json.dumps(job).encode()
        try:
            writer.sendall(len(data).to_bytes(4, "big") + data)
        except OSError as error:
            raise SandboxError(f"a grading jail took no job: {error}") from error

    def _run(self) -> None:
        try:
            self._ended = self._jail.run_python(
                self._source,
                isolated=True,
                stdin=self._end.fileno(),
                timeout=WALL_SECONDS,
                output_bytes=LONGEST_REPORT,
            )
        except SandboxError as error:
            self._ended = error
        finally:
            # the other side sees the closed connection
            self._end.close()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def result(self) -> ExecResult:
        """The result. Raises SandboxError if the jail failed."""
        if isinstance(self._ended, ExecResult):
            return self._ended
        raise self._ended or SandboxError("a grading jail did not end")


Name = Annotated[str, Field(max_length=4096)]
TestReport = TypedDict(
    "TestReport",
    {
        "ready": bool, "collected": list[Name], "check": Name, "import": Name, "forged": Name,
        "state": Literal["pass", "fail", "error", "timeout"], "done": int, "changed": bool,
        "broken": Literal["gone", "late", "forged"] | None, "findings": dict[Name, Name],
        "patched": list[Name], "ended": dict[Literal["exit", "signal"], int], "cpu_s": float,
    },
    total=False,
)  # fmt: skip
"""one report of a jail that runs test files; in some of these jails untrusted code shares the process"""
_REPORT = TypeAdapter(with_config(ConfigDict(strict=True, extra="forbid"))(TestReport))
_UNREADABLE: TestReport = {"forged": "something that is no report"}
MOST_REPORTS = 50_000


def read_reports(stdout: bytes, nonce: str) -> list[TestReport]:
    """The lines with the nonce; one that is no valid report counts as forged."""
    lines = (line for line in stdout.decode("utf-8", "replace").split("\n") if line.startswith(nonce))
    return [_read_report(line[len(nonce) :]) for line in islice(lines, MOST_REPORTS)]


def _read_report(line: str) -> TestReport:
    try:
        return _REPORT.validate_python(read(line, LONGEST_REPORT))
    except (Malformed, ValidationError):
        return _UNREADABLE


def _judged(reports: list[TestReport], ended: ExecResult, solution: _JailSide) -> GradingOutcome:
    """The outcome of the reports: each announced check must have exactly one, and there may be no others."""
    if not reports or reports[0] != {"ready": True}:
        raise TestsFailed(f"the tests' jail did not start: {ended.last_words}")
    announced = [name for r in reports for name in r.get("collected", ())]
    reported = [(r["check"], r.get("state", "error")) for r in reports if "check" in r]
    checks = {**dict.fromkeys(announced, "error"), **dict(reported)} or {"import": "error"}
    last = reports[-1]
    if "findings" not in last:
        if not ended.timed_out:
            raise TestsFailed(f"the tests' jail ended half-way: {ended.last_words}")
        left = {n: s if n in dict(reported) else "timeout" for n, s in checks.items()}
        return GradingOutcome(
            {n: "error" if s == "pass" else s for n, s in left.items()}, (), "agent_timeout"
        )
    if "needs_strict" in last["findings"]:
        raise NeedsStrict(last["findings"]["needs_strict"])
    exact = len(reported) == last.get("done") == len(announced) == len(checks)
    imported = not any("import" in r for r in reports)
    if not (exact and imported):
        checks = {name: "error" if state == "pass" else state for name, state in checks.items()}
    found, kind = _causes(last.get("broken"), solution)
    right = set(checks.values()) == {"pass"}
    findings = dict(last["findings"])
    if (lie := findings.pop("deceit", None)) is not None:
        found.append(Tampering(kind="not_plain", detail=lie))
    if findings.pop("not_plain", None) is not None and not right:
        kind = kind or "not_plain"
    found += [Tampering(kind=k, detail=d) for k, d in findings.items() if k not in _FORGIVEN or not right]
    if last.get("broken"):
        state = "timeout" if kind == "agent_timeout" else "error"
        checks = {name: state if s in ("pass", "error") else s for name, s in checks.items()}
    return GradingOutcome(checks, tuple(found), kind)


_FORGIVEN = ("exit", "skip")
"""findings that do not count if the tests pass: a test may expect the exception"""


def _causes(broken: str | None, solution: _JailSide) -> tuple[list[Tampering], str | None]:
    """Findings and failure kind if the solution stopped answering."""
    if broken is None:
        return [], None
    if broken == "late":
        return [], "agent_timeout"
    if broken == "forged":
        return [], "forged"
    solution.join(_LINGER)
    ended = solution.result()
    if ended.oom:
        return [], "memory"
    if ended.timed_out or ended.signal == signal.SIGXCPU:
        return [], "agent_timeout"
    if ended.exit_code is not None:
        return [Tampering(kind="exit", detail=f"left the process, status {ended.exit_code}")], "exit"
    return [], "crash"
