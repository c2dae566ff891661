"""Candidate tasks of one function or class, and their admission by the grader that training uses.

A candidate is a workspace with something broken, hidden tests that call it, and the edit that repairs it. It
is admitted if the tests fail on the workspace and pass once the edit is made, each in a fresh jail.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nano_coder.grading.submission import Delivery, grade_delivery
from nano_coder.sandbox.protocol import Sandbox
from nano_rl.tasks.mine.packages import MinedPackage
from nano_rl.tasks.mine.targets import (
    LONGEST,
    Breakage,
    Target,
    outline,
    without_body,
    without_definition,
    without_tests,
)
from nano_rl.tasks.mine.test_tasks import admitted_test_task
from nano_rl.tasks.mine.traces import TracedTest, pytest_command
from nano_rl.tasks.mutate import Splice, mutant_of
from nano_shared import snapshot
from nano_shared.blobs import BlobStore, OverlayBlobs
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.hidden_checks import CommandChecks
from nano_shared.snapshot import Snapshot
from nano_shared.snapshot.tree import save
from nano_shared.types import Limits, OracleAction, Provenance, Split, Task

GENERATOR = "nano-rl tasks mine 1"
KINDS = ("bug", "body", "code", "test")
_SHORTEST = 2
"""lines of a body that is asked for"""
_MOST_TESTS, _MOST_FILES, _MOST_SECONDS = 30, 2, 3.0
"""tests of a task, their files, and their time when they were traced"""
_TRIES = 3
"""mutants tried for each bug that is wanted"""
_TIMES, _MORE = 10.0, 20.0
"""a candidate's check may take so many times the time of the same tests on the right code, and so many
seconds more: on a busy machine both are slow"""
_PATIENCE = 600.0
"""seconds for the tests on the right code, which take one where nothing else runs"""
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
    def command(self) -> str:
        files = sorted({test.file for test in self.chosen})
        return pytest_command(self.package, ["-x", self.chosen[0].options, *files])

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

    def claims(self) -> list[str]:
        """Assertions about the function, from the calls that its tests made of it with plain values."""
        name, places = self.target.name, {(self.target.path, line) for line in self.target.functions}
        seen = [row[2:] for test in self.tests for row in test.returns if row[:2] in places]
        return [f"assert {name}({call}) == {result}" for call, result in dict.fromkeys(seen)]

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
    """(target, tests that call it, family) for the targets that any test calls.

    A family is the package, or one of its modules.
    """
    ranked = sorted(tests, key=lambda test: (len(test.calls), test.seconds, test.file, test.name))
    for target in targets:
        places = {(target.path, line) for line in target.functions}
        calling = tuple(test for test in ranked if places & test.calls)
        name = package.origin.name
        if calling:
            yield target, calling, f"mined:{name}:{target.path}" if by_file else f"mined:{name}"


def admit(mined: MinedTarget, kinds: Sequence[str], bugs: int, seed: int, sandbox: Sandbox) -> Iterator[
    tuple[Task | None, str, BlobStore]
]:  # fmt: skip
    """(task or None, why not, blobs of its workspace) for every candidate, at most `bugs` tasks of bugs."""
    seconds = _reference_seconds(mined, sandbox)
    if seconds is None:
        yield None, "all: the tests do not pass on the right code", mined.package.blobs
        return
    made = 0
    for kind, breakage in _breakages(mined, kinds, bugs, seed):
        if kind == "bug" and made == bugs:
            continue
        blobs = OverlayBlobs(mined.package.blobs)
        task, repaired = _task(mined, kind, breakage, seed, blobs)
        refusal = _refusal(task, repaired, blobs, sandbox, _TIMES * seconds + _MORE)
        made += kind == "bug" and refusal is None
        yield (None if refusal else task), f"{kind}: {refusal}", blobs
    if "test" in kinds and (claims := mined.claims()) and not mined.target.is_class:
        task, why = admitted_test_task(
            mined.text, mined.target.name, claims, _described(mined, "test", seed), sandbox
        )
        yield task, f"test: {why}", mined.package.blobs


def _reference_seconds(mined: MinedTarget, sandbox: Sandbox) -> float | None:
    """How long the hidden tests take on the package as it is; None if they do not pass."""
    package, began = mined.package, time.monotonic()
    task = Task(key="reference", prompt="None.", artifacts=package.editable, hidden=mined.hidden)
    right = Delivery(before=package.tree, after=package.tree, blobs=OverlayBlobs(package.blobs))
    verdict = grade_delivery(task, right, sandbox, timeout=_PATIENCE)
    return time.monotonic() - began if verdict is not None and verdict.reward == 1 else None


def _breakages(
    mined: MinedTarget, kinds: Sequence[str], bugs: int, seed: int
) -> Iterator[tuple[str, Breakage]]:
    target, text = mined.target, mined.text
    if "bug" in kinds and not target.is_class:
        splices = [s for s in mined.package.splices(target.path) if target.holds(s.line)]
        random.Random(f"{seed} {mined.package.origin} {target.path} {target.name}").shuffle(splices)
        found = (_mutated(text, splice) for splice in splices)
        yield from [("bug", one) for one in found if one is not None][: _TRIES * bugs]
    if target.documented and _SHORTEST <= target.size <= LONGEST:
        for kind, change in (("body", without_body), ("code", without_definition)):
            if kind in kinds and (breakage := change(text, target)) is not None:
                yield kind, breakage


def _mutated(text: str, splice: Splice) -> Breakage | None:
    mutant = mutant_of(text, splice)
    return None if mutant is None else Breakage(source=mutant.source, line=mutant.line, new=mutant.old)


def _task(
    mined: MinedTarget, kind: str, breakage: Breakage, seed: int, blobs: BlobStore
) -> tuple[Task, Snapshot]:
    """The task, and its workspace once the oracle has repaired it."""
    package, target = mined.package, mined.target
    tests = {} if kind == "bug" else mined.visible_tests()
    repaired = _with(package.tree, tests, blobs)
    broken = save(_with(repaired, {target.path: breakage.source}, blobs), blobs)
    prompt = _PROMPTS[kind].format(
        command=mined.command, places=" or ".join(f"`{place}`" for place in package.editable),
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


def _refusal(
    task: Task, repaired: Snapshot, blobs: BlobStore, sandbox: Sandbox, seconds: float
) -> str | None:
    """Why the task is not admitted: its tests must fail as it stands, and pass once it is repaired."""
    broken = snapshot.load(str(task.snapshot), blobs)
    rewards = []
    for after in (broken, repaired):
        delivery = Delivery(before=broken, after=after, blobs=blobs)
        try:
            verdict = grade_delivery(task, delivery, sandbox, timeout=seconds)
        except UsageError as problem:
            return f"cannot be graded: {problem}"
        state = verdict.checks.get("check", "error") if verdict is not None else "error"
        rewards.append(verdict.reward if verdict is not None else None)
        if after is broken and state == "pass":
            return "the tests pass on it"
        if after is broken and (state != "fail" or rewards[0] != 0):
            return f"the tests do not fail plainly on it: {state}"
    return None if rewards[1] == 1 else "the tests fail on the right code"
