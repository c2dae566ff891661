"""Tasks of real fixes: the source before a change with the tests after it, and the change as the oracle.

The tests run in the sandbox. A test counts if it fails on the old source and passes on the new one, twice
each. One that fails for want of a name that the old source lacks asks for a feature, and is left out.
"""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from nano_coder.grading.command_check import CommandRun, Ran, by_pytest, text_in
from nano_coder.grading.protected_files import is_configuration, is_test
from nano_coder.sandbox.protocol import Sandbox
from nano_mining.task_check import check_task, log_folder, scratch_runtime
from nano_rl.tasks.code_places import TreeHunk, applied, changed_places, edit_actions
from nano_rl.tasks.from_log import texts_of
from nano_shared.files import content_hash
from nano_shared.snapshot import BlobStore, EntryKind, Snapshot, changed_paths, make_snapshot, save
from nano_shared.types import Limits, OracleAction, Provenance, Task

TEST_FILES = ("test_*.py", "*_test.py", "tests.py")
"""files that pytest collects"""
FEATURE = "ask for what the old source lacks: a feature"
NOT_RUN = "have tests that cannot be read or set up on the old source"
_REPORT = ".nano-outcomes.xml"
_ADDOPTS = f"export PYTEST_ADDOPTS='--continue-on-collection-errors --maxfail=0 --junitxml=/work/{_REPORT}'\n"
_PROSE = (".md", ".rst", ".txt", ".adoc")
_NO_SOURCE = ("docs", "doc", ".github", ".circleci", "examples")
_WORKS_ON = ("ImportError", "ModuleNotFoundError", "NameError", "AttributeError", "TypeError")
_MISSING = re.compile(
    r"cannot import name '(\w+)'|No module named '(?:\w+\.)*(\w+)'|name '(\w+)' is not defined"
    r"|has no attribute '(\w+)'|unexpected keyword argument '(\w+)'"
)
"""what the message of an error calls missing"""
_ARGUMENTS = re.compile(r"takes (?:no|from \d+ to \d+|\d+|at most \d+) (?:positional )?arguments?")


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """What the cases of one test function came to."""

    __test__ = False

    state: str
    """pass, fail, error (in its set-up, or where its file is read) or skip"""
    errors: tuple[str, ...] = ()
    """first lines of what its failing cases raised"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestTrials:
    """Runs of a project's tests in the sandbox."""

    __test__ = False

    blobs: BlobStore
    sandbox: Sandbox
    seconds: float
    """longest time of one run"""
    limits: Limits

    def run(self, tree: Snapshot, command: str) -> Ran:
        """Raises SandboxError if the sandbox failed."""
        check = CommandRun(
            command=f"{_ADDOPTS}{command}" if by_pytest(command) else command, blobs=self.blobs,
            sandbox=self.sandbox, limits=self.limits, seconds=self.seconds,
        )  # fmt: skip
        return check.run(tree, keep=(lambda jail: text_in(jail, _REPORT),))

    def outcomes(self, tree: Snapshot, command: str) -> dict[str, TestOutcome]:
        """The test functions by pytest's id, without parameters; none for a run without a report."""
        return _outcomes(self.run(tree, command).kept[0], tree)

    def fixed(self, before: Snapshot, after: Snapshot, command: str) -> tuple[dict[str, TestOutcome], str]:
        """The tests that fail on `before`, pass on `after`, and fail on `before` again, with what they came
        to there; and why there are none. `refusal` runs them once more, and on `after` three times."""
        ran = self.run(before, command)
        if ran.result.timed_out:
            return {}, f"have tests that take over {self.seconds:g} s"
        first = _outcomes(ran.kept[0], before)
        if all(outcome.state == "error" for outcome in first.values()):
            return {}, NOT_RUN
        failing = {test: outcome for test, outcome in first.items() if outcome.state == "fail"}
        if not failing:
            return {}, "have no test that fails on the old source"
        for tree, state, why in (
            (after, "pass", "have tests that fail on the new source too"),
            (before, "fail", "have tests that do not fail twice"),
        ):
            found = self.outcomes(tree, command)
            failing = {test: o for test, o in failing.items() if test in found and found[test].state == state}
            if not failing:
                return {}, why
        return failing, ""


def _outcomes(report: str, tree: Snapshot) -> dict[str, TestOutcome]:
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase")) if report else []
    except ElementTree.ParseError:  # it comes from a jail
        return {}
    files = (path for path in tree.by_path if path.endswith(".py"))
    modules = {path.removesuffix(".py").replace("/", "."): path for path in files}
    found: dict[str, list[TestOutcome]] = {}
    for case in cases:
        name, _, _ = case.get("name", "").partition("[")
        parts = case.get("classname", "").split(".")
        size = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules), 0)
        if size and name:
            test = "::".join([modules[".".join(parts[:size])], *parts[size:], name])
            found.setdefault(test, []).append(_outcome(case))
    return {test: _together(cases) for test, cases in found.items()}


def _outcome(case: ElementTree.Element) -> TestOutcome:
    for tag, state in (("error", "error"), ("failure", "fail"), ("skipped", "skip")):
        if (said := case.find(tag)) is not None:
            first = said.get("message", "").partition("\n")[0]
            return TestOutcome(state, (first,) if state == "fail" else ())
    return TestOutcome("pass")


def _together(cases: Sequence[TestOutcome]) -> TestOutcome:
    states = {case.state for case in cases}
    state = next(state for state in ("error", "fail", "pass", "skip") if state in states)
    return TestOutcome(state, tuple(error for case in cases for error in case.errors))


def asks_for_feature(outcome: TestOutcome, source: Collection[str]) -> bool:
    """Whether a test fails for want of something that the old source lacks, whose words are `source`. It does
    if one of its cases could not import a name, or found an attribute, a name or a keyword argument missing
    that stands nowhere in the source, or was refused a number of arguments."""
    return any(_lacks(error, source) for error in outcome.errors)


def _lacks(error: str, source: Collection[str]) -> bool:
    kind = error.partition(":")[0].rpartition(".")[2]
    if kind not in _WORKS_ON:
        return False
    missing = _MISSING.search(error)
    name = next(filter(None, missing.groups()), "") if missing else ""
    return "Import" in kind or "Module" in kind or (bool(name) and name not in source) or (
        kind == "TypeError" and _ARGUMENTS.search(error) is not None
    )  # fmt: skip


def belongs_to_tests(path: str) -> bool:
    """Whether a file is a test, of the tests' data, or configuration: it is given as the fix left it."""
    return is_test(path) or is_configuration(path)


def is_source(path: str) -> bool:
    """Whether a file is neither of the tests nor documentation: what an oracle may change."""
    place = PurePosixPath(path)
    prose = place.suffix in _PROSE or any(part in _NO_SOURCE for part in place.parts[:-1])
    return not prose and not belongs_to_tests(path)


def with_tests_of(old: Snapshot, new: Snapshot, paths: Iterable[str] | None = None) -> Snapshot:
    """The old tree with the tests of the new one, or with these of its files."""
    changed = [path for path in changed_paths(old, new) if belongs_to_tests(path)]
    kept = {path: entry for path, entry in old.by_path.items() if entry.kind is not EntryKind.DIRECTORY}
    for path in changed if paths is None else paths:
        kept.pop(path, None)
        entry = new.by_path.get(path)
        if entry is not None and entry.kind is not EntryKind.DIRECTORY:
            kept[path] = entry
    return make_snapshot(kept.values())


def source_words(tree: Snapshot, blobs: BlobStore) -> set[str]:
    """The words of a tree's Python files, without its tests."""
    kept = (e for e in tree.entries if e.path.endswith(".py") and is_source(e.path))
    texts = (blobs.get(str(e.content)).decode("utf-8", "replace") for e in kept if e.kind is EntryKind.FILE)
    return {word for text in texts for word in re.findall(r"\w+", text)}


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change that makes tests pass, before it is admitted as a task."""

    source: str
    """where it is from"""
    before: Snapshot
    """old source, new tests"""
    hunks: Sequence[TreeHunk]
    command: str
    """fails on `before`, and passes with the hunks"""
    blobs: BlobStore
    licence: str | None = None

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The changed functions as `path::qualname`."""
        return tuple(changed_places(self.before, applied(self.before, self.hunks, self.blobs), self.blobs))

    def task(self, generator: str, **fields: Any) -> Task:
        """The task; its check is the command, unless `fields` has hidden checks."""
        texts, snapshot = texts_of(self.before, self.blobs), save(self.before, self.blobs)
        prompt = f"`{self.command}` fails. Find the bug and fix it."
        digest = content_hash([prompt, snapshot]).removeprefix("sha256:")[:16]
        oracle = [*edit_actions(self.before, self.hunks, self.blobs), OracleAction(name="submit")]
        if "hidden" not in fields:
            fields["check"] = self.command
            oracle.insert(0, OracleAction(name="shell", arguments={"command": self.command}))
        where = f"{self.source}: {', '.join(self.places)}"
        return Task(
            key=f"fix-{digest}", prompt=prompt, files=texts or {}, snapshot=None if texts else snapshot,
            limits=Limits(max_turns=max(Limits().max_turns, len(oracle))), oracle=tuple(oracle),
            provenance=Provenance(source=where, licence=self.licence, generator=generator), **fields,
        )  # fmt: skip


def refusal(task: Task, blobs: BlobStore, sandbox: Sandbox) -> str | None:
    """Why `nano-rl tasks check` does not admit a task, with the pytest plugins that it may need."""
    with log_folder() as folder:
        runtime = replace(scratch_runtime(folder, blobs), sandbox=sandbox)
        with runtime.store:
            return next(iter(check_task(task, runtime).reasons), None)


def pytest_line(tests: Iterable[str], tree: Snapshot) -> str:
    """The shell line that runs these tests; a `src` folder with Python files is searched for modules."""
    found = any(re.fullmatch(r"src/([^/]+/__init__|[^/]+)\.py", path) for path in tree.by_path)
    return f"{'PYTHONPATH=src ' * found}python -m pytest -q {shlex.join(tests)}"
