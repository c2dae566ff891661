"""Real fixes between consecutive releases of a package: the newer one's tests on the older one's source.

A test that fails on the older source and passes on the newer one is mended by some part of the change between
them. The smallest part found by delta debugging, files first and then hunks, is the oracle of a task.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path

from packaging.version import InvalidVersion, Version

from nano_coder.sandbox.protocol import Sandbox
from nano_mining.fixes import (
    FEATURE,
    NOT_RUN,
    Fix,
    TestOutcome,
    TestTrials,
    asks_for_feature,
    belongs_to_tests,
    is_source,
    refusal,
    source_words,
    with_tests_of,
)
from nano_mining.packages import MinedPackage, read_package
from nano_mining.reduction import parses, reduced
from nano_mining.targets import without_tests
from nano_mining.traces import LIMITS, OPTIONS, pytest_command
from nano_rl.tasks.code_places import TreeHunk, applied, hunks_between
from nano_rl.tasks.suite import split_of
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.files import content_hash, replacing, scratch_folder
from nano_shared.hidden_checks import CommandChecks
from nano_shared.process import own_python
from nano_shared.snapshot import BlobStore, MemoryBlobs, OverlayBlobs, Snapshot, changed_paths
from nano_shared.types import Task

GENERATOR = "nano-rl releases 1"
_NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?")
_LINK = re.compile(r"Found link (\S+?\.tar\.gz)(?:#\S*)?(?: \(.*\))?, version: (\S+)$", re.MULTILINE)
_UNREACHED = re.compile(r"connection error|Retrying \(|Max retries", re.IGNORECASE)
_INDEX_S, _FETCH_S, _TESTS_S, _TRIAL_S = 120.0, 60.0, 120.0, 20.0
_MOST_BYTES = 32 << 20
_MOST_RUNS, _RUNS_OF_TEST = 160, 40
"""runs of tests that look for the smallest changes, of a pair of releases and of a test"""
_MOST_LINES, _MOST_HUNKS = 60, 8
"""of the change of one task"""
_LEVELS = (3, 12)
"""lines removed and added, up to which a task is of level 1 and 2; above, it is of level 3"""


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """A source distribution of a package that an index has."""

    package: str
    version: str
    url: str


def releases_of(package: str) -> list[Release]:
    """The releases of a package that have a `.tar.gz`, the oldest first, without pre-releases; from where pip
    is set up to look. pip lists them and runs nothing of them. Raises UsageError if there are none."""
    if not _NAME.fullmatch(package):
        raise UsageError(f"{package!r} is no name of a package; give one such as humanize")
    command = own_python("-m", "pip", "index", "versions", package, "--no-binary", ":all:", "-vv")
    try:
        done = subprocess.run(
            [*command, "--retries", "1"], capture_output=True, text=True, timeout=_INDEX_S, check=False
        )
    except subprocess.TimeoutExpired:
        late = f"pip found no releases of {package} within {_INDEX_S:g} s"
        raise UsageError(f"{late}; see its index-url") from None
    said = done.stdout + done.stderr
    if "No module named pip" in said:
        raise UsageError(f"pip lists the releases of {package}, and {sys.executable} has none; install pip")
    found: dict[Version, Release] = {}
    for url, text in _LINK.findall(said):
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            found.setdefault(version, Release(package, text, url))
    if not found:
        why = "the index of pip cannot be reached" if _UNREACHED.search(said) else "no index of pip has any"
        raise UsageError(f"no source distributions of {package}: {why}; check the name, and pip's index-url")
    return [found[version] for version in sorted(found)]


def _fetched(release: Release) -> bytes:
    try:
        with urllib.request.urlopen(release.url, timeout=_FETCH_S) as answer:
            data: bytes = answer.read(_MOST_BYTES + 1)
    except (urllib.error.URLError, OSError) as problem:
        raise UsageError(f"{release.url} cannot be fetched: {problem}") from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{release.url} has more than {_MOST_BYTES >> 20} MB")
    return data


@lru_cache(maxsize=8)
def read_release(release: Release) -> MinedPackage:
    """Raises UsageError for a release that cannot be fetched, or that has no tests."""
    with scratch_folder("sdist") as folder:
        path = folder / f"{release.package}-{release.version}.tar.gz"
        path.write_bytes(_fetched(release))
        return read_package(path)


def source_archive(requirement: str, folder: Path) -> Path:
    """The source distribution of `NAME==VERSION`, or of the newest release, kept in `folder`; nothing in it
    is run. Raises UsageError if there is none."""
    name, _, version = requirement.partition("==")
    if version and (path := folder / f"{name}-{version}.tar.gz").is_file():
        return path
    found = [one for one in releases_of(name) if version in ("", one.version)]
    if not found:
        raise UsageError(f"no index of pip has a source distribution of {requirement}")
    path = folder / f"{name}-{found[-1].version}.tar.gz"
    if not path.is_file():
        with replacing(path) as part:
            part.write_bytes(_fetched(found[-1]))
    return path


def source_folder(requirement: str, folder: Path) -> Path:
    """The same unpacked, `folder/NAME-VERSION`."""
    archive = source_archive(requirement, folder)
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    if not unpacked.is_dir():
        with tarfile.open(archive) as packed, scratch_folder("sdist") as scratch:
            packed.extractall(scratch, filter="data")
            shutil.copytree(next(scratch.iterdir()), unpacked, symlinks=True)
    return unpacked


@dataclass(frozen=True, slots=True)
class ReleasePair:
    old: Release
    new: Release
    by_file: bool
    """whether a family of tasks is a module of the package, and not the whole package"""

    @property
    def id(self) -> str:
        return content_hash([GENERATOR, self.old.url, self.new.url, self.by_file])

    def fixes(self, sandbox: Sandbox) -> Iterator[tuple[Task | None, str, BlobStore]]:
        """(task or None, why not, blobs of its workspace) for every test that the newer release mends."""
        try:
            old, new = read_release(self.old), read_release(self.new)
        except UsageError as problem:
            lacks = "no tests found" in str(problem) or "no modules found" in str(problem)
            what = "has no modules or no tests" if lacks else "cannot be fetched or read"
            yield None, f"pairs: one of them {what}", MemoryBlobs()
            return
        blobs = OverlayBlobs(old.blobs)
        snapshot.copy(new.id, new.blobs, blobs)
        trials = TestTrials(blobs=blobs, sandbox=sandbox, seconds=_TESTS_S, limits=LIMITS)
        for task, why in _Mended(pair=self, old=old, new=new, trials=trials).tasks():
            yield task, why, blobs


def pairs_of(releases: Sequence[Release], by_file: bool) -> list[ReleasePair]:
    """Each release and the one after it, the newest first."""
    return [ReleasePair(old, new, by_file) for old, new in pairwise(releases)][::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mended:
    """What the newer of two releases mends."""

    pair: ReleasePair
    old: MinedPackage
    new: MinedPackage
    trials: TestTrials

    def tasks(self) -> Iterator[tuple[Task | None, str]]:
        """(task or None, why not)"""
        blobs = self.trials.blobs
        changed = set(changed_paths(self.old.tree, self.new.tree))
        files = sorted(changed & self.new.tests.keys())
        if not files:
            yield None, "pairs: no test file changed"
            return
        before = with_tests_of(self.old.tree, self.new.tree)
        hunks = hunks_between(before, self.new.tree, filter(self._is_code, changed), blobs)
        after, words = applied(before, hunks, blobs), source_words(self.old.tree, blobs)
        options, found, why = self._failing(files, before, after)
        asking = [test for test, outcome in found.items() if asks_for_feature(outcome, words)]
        if why:
            yield None, f"pairs: {why}"
        yield from ((None, f"tests: {FEATURE}") for _ in asking)
        runs, left = _Runs(_MOST_RUNS), [test for test in found if test not in asking]
        while left and runs.left > 0:
            smallest, tests = self._smallest(left[0], options, before, hunks, runs), left[:1]
            if smallest:
                file = left[0].partition("::")[0]
                mended = self._mended(file, options, applied(before, smallest, blobs))
                tests += [test for test in left[1:] if mended.get(test) == "pass"]
                yield self._task(tests, options, smallest, mended)
            else:
                yield None, f"tests: need whole files, or over {_MOST_HUNKS} hunks or {_MOST_LINES} lines"
            left = [test for test in left if test not in tests]
        yield from ((None, "tests: not looked at, since the runs of their pair were spent") for _ in left)

    def _is_code(self, path: str) -> bool:
        tops = {*self.old.editable, *self.new.editable}
        return is_source(path) and any(path == top or path.startswith(f"{top}/") for top in tops)

    def _command(self, *words: str) -> str:
        """The line that runs tests on either source."""
        moved = (root or "." for root in self.new.roots if root not in self.old.roots)
        return pytest_command(self.old, words, *moved)

    def _failing(
        self, files: Sequence[str], before: Snapshot, after: Snapshot
    ) -> tuple[str, dict[str, TestOutcome], str]:
        """(option that the files need, tests that the newer source mends, why there are none)"""
        for options in OPTIONS:
            found, why = self.trials.fixed(before, after, self._command(options, *files))
            if why != NOT_RUN:
                break
        return options, found, why

    def _mended(self, file: str, options: str, tree: Snapshot) -> dict[str, str]:
        """State of each test of a file."""
        found = self.trials.outcomes(tree, self._command(options, file))
        return {test: outcome.state for test, outcome in found.items()}

    def _smallest(
        self, test: str, options: str, before: Snapshot, hunks: Sequence[TreeHunk], runs: _Runs
    ) -> list[TreeHunk]:
        """The smallest part of the change found that makes a test pass: of its files, then of their hunks.
        Empty if it needs whole files, or is too large."""
        command, blobs = self._command("-x", options, test), self.trials.blobs
        trials, runs_of_test = replace(self.trials, seconds=_TRIAL_S), _Runs(min(runs.left, _RUNS_OF_TEST))

        def mends(some: Sequence[TreeHunk]) -> bool:
            tree = applied(before, some, blobs)
            if not parses(tree, some, blobs) or not runs_of_test.one_more():
                return False
            return trials.run(tree, command).result.ok

        edits = [hunk for hunk in hunks if hunk.first is not None]
        if not mends(edits):
            runs.left -= 1
            return []
        by_file = [list(group) for _, group in groupby(edits, attrgetter("path"))]
        files = reduced(by_file, lambda some: mends([hunk for group in some for hunk in group]))
        found = reduced([hunk for group in files for hunk in group], mends)
        runs.left -= _RUNS_OF_TEST - max(0, runs_of_test.left)
        small = len(found) <= _MOST_HUNKS and sum(hunk.size for hunk in found) <= _MOST_LINES
        return found if small else []

    def _task(
        self, tests: Sequence[str], options: str, hunks: Sequence[TreeHunk], mended: dict[str, str]
    ) -> tuple[Task | None, str]:
        size = sum(hunk.size for hunk in hunks)
        file, names = tests[0].partition("::")[0], {test.rpartition("::")[2] for test in tests}
        others = {test.rpartition("::")[2] for test, state in mended.items() if state in ("fail", "error")}
        text = without_tests(self.new.tests[file], (others - names).__contains__)
        tree = self._workspace(file, text)
        fix = Fix(
            source=f"{self.old.origin} to {self.new.origin.version}", before=tree, hunks=hunks,
            command=self._command(options, *tests), blobs=self.trials.blobs, licence=self.new.origin.licence,
        )  # fmt: skip
        package = self.old.origin.name
        family = f"mined:{package}:{hunks[0].path}" if self.pair.by_file else f"mined:{package}"
        task = fix.task(
            GENERATOR, artifacts=self.old.editable, family=family, split=split_of(family), view="mined_fix",
            level=1 + sum(size > lines for lines in _LEVELS),
            hidden=CommandChecks(command=fix.command, files={**self.new.support(file), file: text}),
        )  # fmt: skip
        why = refusal(task, self.trials.blobs, self.trials.sandbox)
        return (None if why else task), f"fixes: refused: {why}"

    def _workspace(self, file: str, text: str) -> Snapshot:
        """The old source and tests, with a test file of the newer release and what its tests may read."""
        changed = changed_paths(self.old.tree, self.new.tree)
        support = (p for p in changed if belongs_to_tests(p) and p not in {*self.old.tests, *self.new.tests})
        tree = with_tests_of(self.old.tree, self.new.tree, [*support, file])
        content = self.trials.blobs.put(text.encode())
        return Snapshot(tuple(replace(e, content=content) if e.path == file else e for e in tree.entries))


@dataclass(slots=True)
class _Runs:
    """Runs that are left for the search of a pair."""

    left: int

    def one_more(self) -> bool:
        self.left -= 1
        return self.left >= 0
