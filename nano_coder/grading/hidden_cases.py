"""Values compared in this process: answers, and those of hidden cases, which the artifact computes in a jail
by a bundled program."""

from __future__ import annotations

import ast
import base64
import functools
import importlib.util
import json
import marshal
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nano_coder.grading.inside.report import LONGEST_NAME, SKIPS, Malformed, read
from nano_coder.sandbox.protocol import ExecResult, Sandbox
from nano_shared.errors import SandboxError
from nano_shared.extension_points import Extensions
from nano_shared.hidden_checks import Case, CaseChecks, ChecksOfAKind
from nano_shared.printable import printable
from nano_shared.process import parse_expression
from nano_shared.types import Tampering, Task, Trust

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""a number as JSON writes it; no other spelling is accepted"""
_LONGEST = 100_000
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.]+|\s+|.""", re.DOTALL)


def same(given: Any, expected: Any) -> bool:
    """Equal in value and exact type, recursively: True is not 1, 1 is not 1.0, NaN equals nothing."""
    if type(given) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    return bool(given == expected)


def same_answer(text: str | None, expected: Any) -> bool:
    """Whether a submitted text gives the expected value.

    No answer is never right. If a text is expected, texts are compared, ignoring blanks and quotes around
    them and, in a bracketed text, blanks between items and the kind of quotes. Any other value is read from
    JSON or a Python literal, with numbers spelt as JSON spells them: an answer must not be the question in
    another notation.
    """
    if text is None:
        return False
    if isinstance(expected, str):
        return _parts(text) == _parts(expected)
    return any(same(reading, expected) for reading in _readings(text.strip()))


def _parts(text: str) -> list[str]:
    """A text without blanks and quotes around it; a bracketed one as a list of its tokens."""
    text = text.strip()
    if text[:1] in "([{" and text[-1:] in ")]}" and 2 <= len(text) <= _LONGEST:
        return [_unquoted(token) for token in _TOKEN.findall(text) if not token.isspace()]
    return [_without_quotes(text).strip()]


def _unquoted(token: str) -> str:
    """A quoted token as a mark and its text, so that it differs from the same token without quotes."""
    inner = _without_quotes(token)
    return token if inner == token else f"'{inner}"


def _without_quotes(text: str) -> str:
    if len(text) < 2 or text[0] not in "'\"" or text[0] != text[-1]:
        return text
    # only escaped quotes are undone: any other escape is part of the text
    return re.sub(r"\\(.)", lambda m: m[1] if m[1] in "'\"" else m[0], text[1:-1], flags=re.DOTALL)


def _readings(text: str) -> list[Any]:
    """The values that a text spells as JSON and as a Python literal (tuples as lists)."""
    readings: list[Any] = []
    if len(text) > _LONGEST or not _plainly_spelt(text):
        return readings
    with suppress(ValueError, RecursionError):
        readings.append(json.loads(text))
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        readings.append(_lists(ast.literal_eval(parse_expression(text.lstrip(" \t")))))
    return readings


def _plainly_spelt(text: str) -> bool:
    """Whether every number outside quotes is spelt as JSON spells it."""
    before = ""
    for token in _TOKEN.findall(text):
        if token == "+" and not _SCALED.fullmatch(before):
            return False
        before = token
        known = token.isalpha() or NUMBER.fullmatch(token) or _SCALED.fullmatch(token)
        if re.match(r"[\w.]", token) and not known:
            return False
    return True


_SCALED = re.compile(r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE]")
"""the part of 1e-5 that `_TOKEN` matches before the sign"""


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


INSIDE = Path(__file__).with_name("inside")
"""folder of the modules that run in jails"""
_TEMPLATE = """\
import base64, importlib.util, marshal, sys, types, zlib
sys.modules["inside"] = package = types.ModuleType("inside")
package.__path__ = []
same = importlib.util.MAGIC_NUMBER == {magic!r}
for name, code, text in {modules!r}:
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    packed = zlib.decompress(base64.b64decode(code if same else text))
    exec(marshal.loads(packed) if same else compile(packed, name, "exec"), vars(module))
    setattr(package, name, module)
package.{call}
"""


def program(call: str, *modules: Path) -> str:
    """Python source that makes the modules importable as parts of a package `inside`, and then evaluates
    `call` on it.

    `modules` are files, in import order, which import each other relatively, and those of our own `inside`
    by their names here. Compiled code is used if the jail's interpreter has our version, else the source. The
    program fits into one command-line argument.
    """
    bundled = [(path.stem, *_packed(path)) for path in modules]
    return _TEMPLATE.format(modules=bundled, magic=importlib.util.MAGIC_NUMBER, call=call)


@functools.cache
def _packed(path: Path) -> tuple[str, str]:
    """A module's compiled code and its text, compressed."""
    text = path.read_bytes().replace(b"nano_coder.grading.inside", b"inside")
    code = marshal.dumps(compile(text, f"inside/{path.name}", "exec", dont_inherit=True, optimize=0))
    return (
        base64.b64encode(zlib.compress(code, 9)).decode(),
        base64.b64encode(zlib.compress(text, 9)).decode(),
    )


_MODULES = [INSIDE / f"{name}.py" for name in ("report", "plain_values", "case_runner")]
CPU_SECONDS = 2
WALL_SECONDS = 10.0
PATIENCE = 1
"""number of cases that may hang before the rest is skipped"""
LONGEST_REPORT = 64 << 20


@dataclass(frozen=True, slots=True)
class GradingOutcome:
    """The result of all checks of a task."""

    checks: dict[str, str]
    """check name -> pass | fail | error | timeout"""
    tampering: tuple[Tampering, ...] = ()
    failure_kind: str | None = None
    trust: Trust = Trust.HIDDEN
    score: float | None = None
    """in [0, 1], where it is not the fraction of passed checks"""

    @property
    def passed(self) -> float:
        """Fraction of the checks that passed."""
        return sum(state == "pass" for state in self.checks.values()) / len(self.checks)

    @property
    def right(self) -> bool:
        return self.passed == 1.0 and not self.tampering


@dataclass(slots=True)
class _Tally:
    checks: dict[str, str] = field(default_factory=dict)
    tampering: list[Tampering] = field(default_factory=list)

    def take(self, name: str, state: str, *found: Tampering) -> None:
        self.checks[name] = state
        self.tampering += [f for f in found if f.kind not in {t.kind for t in self.tampering}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What an agent left of what its task's checks read, and the jails to grade it in."""

    task: Task
    checks: ChecksOfAKind
    files: Mapping[str, bytes]
    others: Collection[str] = ()
    """paths that are no regular files"""
    answer: str | None = None
    sandbox: Sandbox


CHECKS: Extensions[Callable[[Submission], GradingOutcome]] = Extensions("nano.checks")
"""what grades the checks of a kind that is not the core's"""


def run_cases(given: Submission, forbidden: Collection[str] | None = None) -> GradingOutcome:
    """Call the entry point of the first artifact on every case, in one clean jail that holds only the
    artifacts, which may not import `forbidden` modules, nor run code that is not in their text (None: any).

    Raises SandboxError if the jail fails.
    """
    hidden, sandbox = given.checks, given.sandbox
    assert isinstance(hidden, CaseChecks)
    texts = {name: data.decode("utf-8", "surrogateescape") for name, data in given.files.items()}
    job: dict[str, Any] = {
        "files": texts, "target": given.task.artifacts[0], "entry": hidden.entry_point,
        "cases": [{"args": c.args, "kwargs": c.kwargs} for c in hidden.cases],
        "cpu_seconds": CPU_SECONDS, "wall_seconds": WALL_SECONDS, "patience": PATIENCE,
        "forbidden": None if forbidden is None else sorted(forbidden),
    }  # fmt: skip
    wall = 30.0 + PATIENCE * WALL_SECONDS + len(hidden.cases) * (CPU_SECONDS + 1)
    nonce, token = secrets.token_hex(16), secrets.token_hex(16)
    with closing(sandbox.open(None, given.task.limits)) as jail:
        result = jail.run_python(
            program("case_runner.main()", *_MODULES),
            isolated=True,
            stdin=json.dumps({"nonce": nonce, "token": token, **job}).encode(),
            timeout=wall,
            output_bytes=LONGEST_REPORT,
        )
    # more reports than cases prove forgery; there is no need to read all of them
    reports = list(islice(_reports(result.stdout, nonce), len(hidden.cases) + 3))
    if not reports or reports[0] != {"ready": True}:
        raise SandboxError(f"the grading child did not start: {result.last_words}")
    expected = {name: case.expected for name, case in zip(names(hidden.cases), hidden.cases, strict=True)}
    return judged(expected, reports[1:], result)


def names(cases: tuple[Case, ...]) -> list[str]:
    return [f"case_{number}" for number in range(1, len(cases) + 1)]


def _reports(stdout: bytes, nonce: str) -> Iterator[dict[str, Any]]:
    """Every line with the nonce; any other line is reported as forged."""
    for line in stdout.decode("utf-8", "replace").split("\n"):
        if line.startswith(nonce):
            try:
                yield read(line[len(nonce) :])
            except Malformed:
                yield {"forged": line[len(nonce) :][:80]}
        elif line:
            yield {"forged": line[:80]}


def judged(expected: Mapping[str, Any], reports: list[dict[str, Any]], result: ExecResult) -> GradingOutcome:
    """The outcome of the reports on the checks, which are the names of the expected values."""
    checks = list(expected)
    tally = _Tally()
    complete = len(reports) == len(checks) + 1 and reports[-1] == {"done": True}
    for name, report in zip(checks, reports, strict=False):
        _judge(tally, name, expected[name], report)
    for name in checks[len(tally.checks) :]:
        tally.take(name, "timeout" if result.timed_out else "error")
    kind = "agent_timeout" if "timeout" in tally.checks.values() else None
    if kind is None and any("not_plain" in report for report in reports):
        kind = "not_plain"
    if not complete:
        kind = "agent_timeout" if result.timed_out else "memory" if result.oom else "child_killed"
        if kind == "child_killed":
            how = f"exit {result.exit_code}, signal {result.signal}, {len(reports)} reports"
            tally.tampering.append(
                Tampering(kind="child_killed", detail=f"the grading child was disturbed: {how}")
            )
        tally.checks = {name: "error" if state == "pass" else state for name, state in tally.checks.items()}
    return GradingOutcome(tally.checks, tuple(tally.tampering), kind)


def _judge(tally: _Tally, name: str, expected: Any, report: dict[str, Any]) -> None:
    match report:
        case {"value": value}:
            tally.take(name, "pass" if same(value, expected) else "fail")
        case {"timeout": _}:
            tally.take(name, "timeout")
        case {"exit": status}:
            what = f"{name}: left the process, status {_report_text(status)}"
            tally.take(name, "error", Tampering(kind="exit", detail=what))
        case {"raise": "SystemExit"}:
            tally.take(name, "error", Tampering(kind="exit", detail=f"{name}: raised SystemExit"))
        case {"raise": error} if error in SKIPS:
            tally.take(name, "error", Tampering(kind="skip", detail=f"{name}: raised {error}"))
        case {"hidden_code": what}:
            what = f"{name}: asked for {_report_text(what)}, by which code runs that was not measured"
            tally.take(name, "error", Tampering(kind="hidden_code", detail=what))
        case {"deceit": what}:
            what = f"{name}: returned {_report_text(what)}, whose comparisons say what is not"
            tally.take(name, "fail", Tampering(kind="not_plain", detail=what))
        case {"not_plain": _}:
            tally.take(name, "fail")
        case {"forged": text}:
            tally.take(
                name, "error", Tampering(kind="forged", detail=f"{name}: wrote {text!r} to the channel")
            )
        case _:
            tally.take(name, "error")


def _report_text(value: Any) -> str:
    """A part of a report, which may be anything, as printable text."""
    return printable(str(value)[:LONGEST_NAME])
