"""Grading a function by cases: computed in a jail that knows no expected value, compared here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from nano_coder.grading.compare import same_value
from nano_coder.sandbox import ExecResult, Sandbox
from nano_shared.errors import SandboxError
from nano_shared.hashing import content_hash
from nano_shared.types import HiddenChecks, Tampering, Task, Trust, Verdict

_CHILD = (Path(__file__).parent / "child.py").read_text(encoding="utf-8")
_CASE_SECONDS = 5.0
_OUTPUT_BYTES = 16 << 20


def grade_cases(
    checks: HiddenChecks, task: Task, files: Mapping[str, bytes], sandbox: Sandbox, *, grader: str
) -> Verdict:
    """Reward 1 if every case has its expected value, else 0; the component `tests` is the fraction.

    Raises SandboxError where the jail fails, which says nothing about the solution.
    """
    graded = content_hash({name: content_hash(data) for name, data in files.items()})
    if not task.artifacts or task.artifacts[0] not in files:
        return _verdict(0.0, 0.0, {}, graded, grader, failure="no_artifact")
    result = _compute(checks, task, files, sandbox)
    answers = _answers(result)
    if answers is None:
        return _verdict(0.0, 0.0, {}, graded, grader, failure="agent_run_error", tampering=_broke(result))
    outcomes = {}
    for index, case in enumerate(checks.cases):
        answer = answers[index] if index < len(answers) else {"status": "timeout"}
        outcomes[f"case_{index}"] = _outcome(answer, case.expected)
    passed = sum(outcome == "pass" for outcome in outcomes.values())
    failure = "agent_timeout" if "timeout" in outcomes.values() else None
    whole = float(passed == len(checks.cases))
    return _verdict(whole, passed / len(checks.cases), outcomes, graded, grader, failure=failure)


def _compute(checks: HiddenChecks, task: Task, files: Mapping[str, bytes], sandbox: Sandbox) -> ExecResult:
    name = task.artifacts[0]
    request = {
        "module": Path(name).stem,
        "path": f"/work/{name}",
        "entry_point": checks.entry_point,
        "seconds": _CASE_SECONDS,
        "cases": [{"args": case.args, "kwargs": case.kwargs} for case in checks.cases],
    }
    with closing(sandbox.open(None, task.limits)) as jail:
        for path, data in files.items():
            jail.write(path, data)
        return jail.run(
            [sandbox.python, "-I", "-B", "-c", _CHILD],
            stdin=json.dumps(request).encode(),
            timeout=_CASE_SECONDS + 0.5 * len(checks.cases) + 5,
            output_bytes=_OUTPUT_BYTES,
        )


def _answers(result: ExecResult) -> list[dict[str, Any]] | None:
    """What the child reported, or None where it did not finish."""
    if result.exit_code != 0 or result.truncated:
        if b"SyntaxError" in result.stderr and b"<string>" in result.stderr:
            raise SandboxError(
                "the grader's own program does not run under this interpreter; choose --python"
            )
        return None
    try:
        answers = json.loads(result.stdout)
    except ValueError:
        return None
    return answers if isinstance(answers, list) else None


def _broke(result: ExecResult) -> tuple[Tampering, ...]:
    how = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
    return (Tampering(kind="grader_stopped", detail=f"the grading process did not report ({how})"),)


def _outcome(answer: dict[str, Any], expected: object) -> str:
    if answer.get("status") == "ok":
        return "pass" if same_value(answer.get("value"), expected) else "fail"
    return "timeout" if answer.get("status") == "timeout" else "error"


def _verdict(
    reward: float,
    fraction: float,
    checks: dict[str, str],
    graded: str,
    grader: str,
    *,
    failure: str | None = None,
    tampering: tuple[Tampering, ...] = (),
) -> Verdict:
    return Verdict(
        reward=reward,
        components={"tests": fraction},
        checks=checks,
        tampering=tampering,
        failure_kind=failure,
        trust=Trust.HIDDEN,
        grader=grader,
        graded_hash=graded,
    )
