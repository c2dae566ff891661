"""Candidate tasks of one function or class, and their admission by the grader that training uses.

A candidate is a workspace with something broken, hidden tests that call it, and the edit that repairs it. It
is admitted if the tests fail on it and pass on the right code. Those of several functions are tried in one
jail; one of them is then graded as in training, as it stands and repaired, each in a fresh jail.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nano_coder.grading.grade import Delivery, grade_delivery
from nano_coder.sandbox.protocol import Sandbox
from nano_mining.packages import MinedPackage
from nano_mining.targets import (
    LONGEST,
    Breakage,
    Target,
    outline,
    without_body,
    without_definition,
    without_tests,
)
from nano_mining.traces import TracedTest, pytest_command
from nano_mining.trials import TrialJob, Version, try_versions
from nano_rl.tasks.mutate import mutant_of
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import CommandChecks
from nano_shared.snapshot import BlobStore, OverlayBlobs, Snapshot, save
from nano_shared.types import Limits, OracleAction, Provenance, Split, Task

GENERATOR = "nano-rl tasks mine 4"
KINDS = ("bug", "body", "code")
_SHORTEST = 2
"""lines of a body that is asked for"""
_MOST_TESTS, _MOST_FILES, _MOST_SECONDS = 30, 2, 3.0
"""tests of a task, their files, and their time when they were traced"""
_TRIES = 3
"""mutants tried for each bug that is wanted"""
_TEST_ID = re.compile(r"[\w./-]+(::\w+)+")
_LEVELS = (5, 15)
"""lines of what is asked for, up to which a task is of level 1 and 2; above, it is of level 3"""
_PROMPTS = {
    "bug": "`{command}` fails. Find the bug in {places} and fix it.",
    "body": (
        "In `{path}`, `{name}` raises NotImplementedError. Write its body, as its signature and docstring"
        " say; tests that you do not see call it."
    ),
    "code": (
        "`{path}` lacks `{name}`. Write it there, with this signature and as its docstring says; tests that"
        " you do not see call it.\n\n```python\n{outline}\n```"
    ),
}


@dataclass(frozen=True, kw_only=True)
class MinedTarget:
    """A function or class, with the tests of its package that call it."""

    package: MinedPackage
    target: Target
    tests: tuple[TracedTest, ...]
    """all that call it, those that call least else first"""
    family: str
    split: Split

    @property
    def text(self) -> str:
        return self.package.modules[self.target.path]

    @cached_property
    def chosen(self) -> tuple[TracedTest, ...]:
        """The tests of its tasks."""
        files: set[str] = set()
        kept, seconds = [], 0.0
        for test in self.tests:
            fits = test.file in files or len(files) < _MOST_FILES
            if fits and test.options == self.tests[0].options and seconds + test.seconds <= _MOST_SECONDS:
                kept.append(test)
                files.add(test.file)
                seconds += test.seconds
        return tuple(kept[:_MOST_TESTS])

    @property
    def words(self) -> tuple[str, ...]:
        """What pytest is told: an option that the files need, and the files."""
        return ("-x", self.chosen[0].options, *sorted({test.file for test in self.chosen}))

    @property
    def command(self) -> str:
        return pytest_command(self.package, self.words)

    def failing(self, test: str) -> str:
        """The command that runs the test of that id, without its parameters; all, if it is not chosen."""
        name = test.partition("[")[0]
        known = any(name.startswith(f"{t.file}::") and name.endswith(f"::{t.name}") for t in self.chosen)
        words = (self.chosen[0].options, name) if known and _TEST_ID.fullmatch(name) else self.words
        return pytest_command(self.package, words)

    @cached_property
    def hidden(self) -> CommandChecks:
        """The chosen tests alone, with the files that pytest reads for them."""
        names = {(test.file, test.name) for test in self.chosen}
        files: dict[str, str] = {}
        for file in sorted({test.file for test in self.chosen}):
            kept = {name for of, name in names if of == file}
            files |= self.package.support(file)
            files[file] = without_tests(self.package.tests[file], lambda name, kept=kept: name not in kept)
        return CommandChecks(command=self.command, files=files)

    @property
    def hideable(self) -> bool:
        """Whether all tests that call it stand in their files, and are not inherited from elsewhere."""
        return all(f"def {test.name}(" in self.package.tests[test.file] for test in self.tests)

    def visible_tests(self) -> dict[str, str]:
        """The test files without the tests that call it."""
        files = sorted({test.file for test in self.tests})
        dropped = {file: {test.name for test in self.tests if test.file == file} for file in files}
        return {
            file: without_tests(self.package.tests[file], lambda name, of=file: name in dropped[of])
            for file in files
        }


def mined_targets(
    package: MinedPackage, targets: Iterable[Target], tests: Sequence[TracedTest], by_file: bool
) -> Iterator[tuple[Target, tuple[TracedTest, ...], str]]:
    """(target, its tests, family) of targets that tests call; a family is the package, or a module."""
    ranked = sorted(tests, key=lambda test: (len(test.calls), test.seconds, test.file, test.name))
    for target in targets:
        places = {(target.path, line) for line in target.functions}
        calling = tuple(test for test in ranked if places & test.calls)
        name = package.origin.name
        if calling:
            yield target, calling, f"mined:{name}:{target.path}" if by_file else f"mined:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTrials:
    """What is made of functions and classes of one package."""

    kinds: Sequence[str]
    bugs: int
    """tasks of bugs of one function, at most"""
    seed: int
    sandbox: Sandbox

    def admit(self, some: Sequence[MinedTarget]) -> Iterator[tuple[Task | None, str, BlobStore]]:
        """(task or None, why not, blobs of its workspace) for every candidate."""
        found = [list(_breakages(mined, self.kinds, self.bugs, self.seed)) for mined in some]
        jobs = [self._job(mined, broken) for mined, broken in zip(some, found, strict=True)]
        graded = False
        for mined, broken, trials in zip(
            some, found, try_versions(some[0].package, jobs, self.sandbox), strict=True
        ):
            blobs = mined.package.blobs
            if trials is None:
                yield None, "all: the tests do not pass on the right code", blobs
                continue
            made = []
            for (kind, breakage), trial in zip(broken, trials, strict=True):
                if trial is not None and trial.refusal is None:
                    own = OverlayBlobs(blobs)
                    made.append((*_task(mined, kind, breakage, trial.failed, self.seed, own), own))
                elif trial is not None:
                    yield None, f"{kind}: {trial.refusal}", blobs
            refusal = _refusal(*made[-1], self.sandbox) if made and not graded else None
            graded = graded or bool(made)
            for task, _, own in made:
                yield (None if refusal else task), f"graded: {refusal}", own

    def _job(self, mined: MinedTarget, broken: Sequence[tuple[str, Breakage]]) -> TrialJob:
        path = mined.target.path
        versions = [Version(group=kind, path=path, text=breakage.source) for kind, breakage in broken]
        most = {"bug": self.bugs}
        return TrialJob(words=mined.words, files=mined.hidden.files, versions=versions, most=most)


def _breakages(
    mined: MinedTarget, kinds: Sequence[str], bugs: int, seed: int
) -> Iterator[tuple[str, Breakage]]:
    target, text = mined.target, mined.text
    if "bug" in kinds and not target.is_class:
        splices = [s for s in mined.package.splices(target.path) if target.holds(s.line)]
        random.Random(f"{seed} {mined.package.origin} {target.path} {target.name}").shuffle(splices)
        found = (mutant_of(text, splice) for splice in splices)
        by_line = {one.line: one for one in found if one is not None}  # two of a line are mended alike
        for one in list(by_line.values())[: _TRIES * bugs]:
            yield "bug", Breakage(source=one.source, line=one.line, new=one.old)
    if target.documented and mined.hideable and _SHORTEST <= target.size <= LONGEST:
        for kind, change in (("body", without_body), ("code", without_definition)):
            if kind in kinds and (breakage := change(text, target)) is not None:
                yield kind, breakage


def _task(
    mined: MinedTarget, kind: str, breakage: Breakage, failed: str, seed: int, blobs: BlobStore
) -> tuple[Task, Snapshot]:
    """The task, and its workspace once the oracle has repaired it. `failed` is a failing test's id."""
    package, target = mined.package, mined.target
    tests = {} if kind == "bug" else mined.visible_tests()
    repaired = _with(package.tree, tests, blobs)
    broken = save(_with(repaired, {target.path: breakage.source}, blobs), blobs)
    prompt = _PROMPTS[kind].format(
        command=mined.failing(failed), places=" or ".join(f"`{place}`" for place in package.editable),
        path=target.path, name=target.name, outline=outline(mined.text, target),
    )  # fmt: skip
    edit = {"path": target.path, "line": breakage.line, "new": breakage.new}
    digest = content_hash([prompt, broken]).removeprefix("sha256:")[:16]
    task = Task(
        key=f"mined-{kind}-{digest}", prompt=prompt, snapshot=broken, artifacts=package.editable,
        hidden=mined.hidden, limits=Limits(),
        oracle=(OracleAction(name="edit_file", arguments=edit), OracleAction(name="submit")),
        **_described(mined, kind, seed),
    )  # fmt: skip
    return task, repaired


def _described(mined: MinedTarget, kind: str, seed: int) -> dict[str, Any]:
    """The fields of a task that say what it is and where it is from."""
    target, origin = mined.target, mined.package.origin
    where = f"{origin}: {target.path}:{target.first} {target.name}"
    return {
        "split": mined.split, "family": mined.family, "view": f"mined_{kind}", "program_hash": target.hash,
        "level": 1 + sum(target.size > lines for lines in _LEVELS),
        "provenance": Provenance(source=where, licence=origin.licence, generator=GENERATOR, seed=seed),
    }  # fmt: skip


def _with(tree: Snapshot, texts: dict[str, str], blobs: BlobStore) -> Snapshot:
    ids = {path: blobs.put(text.encode()) for path, text in texts.items()}
    return Snapshot(tuple(replace(e, content=ids[e.path]) if e.path in ids else e for e in tree.entries))


def _refusal(task: Task, repaired: Snapshot, blobs: BlobStore, sandbox: Sandbox) -> str | None:
    """Why the grader of training does not admit it: its tests must fail on it, and pass once repaired."""
    broken = snapshot.load(str(task.snapshot), blobs)
    rewards = []
    for after in (broken, repaired):
        try:
            verdict = grade_delivery(task, Delivery(before=broken, after=after, blobs=blobs), sandbox)
        except UsageError as problem:
            return f"cannot be graded: {problem}"
        rewards.append(verdict.reward if verdict is not None else None)
    return None if rewards == [0, 1] else f"as it stands and repaired it earns {rewards}"
