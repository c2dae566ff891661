"""Tasks of the bug-fix commits of a git history: the parent's source with the commit's tests.

git runs in a jail, on the objects of the repository alone; the working tree, and what is not committed in it,
is not read. The subject of a commit often says what was wrong, so that no prompt holds it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from nano_coder.grading.protected_files import is_test
from nano_coder.run.git_history import GitHistory, NoHistory, find_history, history_jail
from nano_coder.sandbox.protocol import Jail, Sandbox
from nano_mining.fixes import (
    FEATURE,
    TEST_FILES,
    Fix,
    TestTrials,
    asks_for_feature,
    is_source,
    pytest_line,
    refusal,
    source_words,
    with_tests_of,
)
from nano_rl.tasks.code_places import applied, hunks_between
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.snapshot import (
    BlobStore,
    Entry,
    EntryKind,
    OverlayBlobs,
    Snapshot,
    SnapshotError,
    make_snapshot,
)
from nano_shared.types import Limits, Task

GENERATOR = "nano-rl commits 1"
_MOST_FILES, _MOST_BYTES = 20_000, 64 << 20
"""of a commit's tree"""
_GIT_S = 60.0
_KINDS = {"120000": EntryKind.SYMLINK, "100644": EntryKind.FILE, "100755": EntryKind.FILE}
_LINE = re.compile(r"(\d{6}) blob ([0-9a-f]+) +(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far a history is searched."""

    commits: int = 500
    """without merges, the newest first"""
    seconds: float = 600.0
    check_seconds: float = 60.0
    """longest time of one run of the tests"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTask:
    """A task of a commit that mended a bug."""

    task: Task
    commit: str
    solved: Snapshot
    """the workspace with the commit's change"""


def commit_tasks(
    repository: Path, blobs: BlobStore, sandbox: Sandbox, *,
    check: str | None = None, bounds: Bounds | None = None, refused: Counter[str] | None = None,
    known: Collection[str] = (), on_commit: Callable[[str], object] = lambda commit: None,
    seconds: float = 600.0,
) -> Iterator[CommitTask]:  # fmt: skip
    """The tasks of a repository's bug-fix commits, the newest first, each when it was admitted by running.

    The check of a task is `check`, or else the tests that the commit mends, by pytest. `refused` counts the
    other commits by reason. Commits in `known` are passed over; `on_commit` gets each of the others when it
    was tried. `seconds` is the time where no `bounds` are given. Raises UsageError for a folder whose git
    history cannot be read.
    """
    try:
        if (history := find_history(repository)) is None:
            why = "its commits are what tasks are made of (-C FOLDER)"
            raise UsageError(f"{repository} has no git history: {why}")
        jail = history_jail(history, sandbox, None, Limits())
    except NoHistory as reason:
        raise UsageError(f"the git history of {repository} cannot be used: {reason}") from None
    bounds = bounds or Bounds(seconds=seconds)
    counts = refused if refused is not None else Counter[str]()
    until = time.monotonic() + bounds.seconds
    with closing(jail):
        commits = _Commits(jail=jail, history=history, blobs=OverlayBlobs(blobs))
        for commit, parents in commits.newest(bounds.commits):
            if commit in known:
                continue
            if time.monotonic() > until:
                counts["were not reached in time"] += 1
                continue
            try:
                made = _of_commit(commits, commit, parents, check, sandbox, bounds.check_seconds)
            except SnapshotError as problem:
                made = f"cannot be read: {problem}"
            if isinstance(made, CommitTask):
                if made.task.snapshot is not None:
                    snapshot.copy(made.task.snapshot, commits.blobs, blobs)
                yield made
            else:
                counts[made] += 1
            on_commit(commit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commits:
    """The commits of a repository, read by a git in a jail."""

    jail: Jail
    history: GitHistory
    blobs: BlobStore
    known: dict[str, str] = field(default_factory=dict)
    """git's id of a file -> its blob"""

    def newest(self, most: int) -> list[tuple[str, list[str]]]:
        """(commit, its parents), without merges."""
        text = self._git("log", "--no-merges", f"--max-count={most}", "--format=%H %P", "HEAD").decode()
        return [(commit, parents) for commit, *parents in map(str.split, text.splitlines())]

    def changed(self, parent: str, commit: str) -> list[str]:
        names = self._git("diff-tree", "-r", "-z", "--no-renames", "--name-only", parent, commit)
        return [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]

    def tree(self, commit: str) -> Snapshot:
        """Raises SnapshotError for a tree that is too large, or that a workspace cannot hold."""
        listed = self._git("ls-tree", "-r", "-l", "-z", "--full-tree", commit).split(b"\0")[:-1]
        parts = (line.partition(b"\t") for line in listed)
        found = [(_LINE.fullmatch(head.decode()), name) for head, _, name in parts]
        files = [(*line.groups(), name.decode("utf-8", "surrogateescape")) for line, name in found if line]
        if len(files) > _MOST_FILES or sum(int(size) for _, _, size, _ in files) > _MOST_BYTES:
            raise SnapshotError("its tree is too large")
        self._fetch(sorted({id for _, id, _, _ in files} - self.known.keys()))
        return make_snapshot(self._entry(mode, id, path) for mode, id, _, path in files if mode in _KINDS)

    def _entry(self, mode: str, id: str, path: str) -> Entry:
        path, blob = snapshot.clean_path(path), self.known[id]
        if mode == "120000":
            return Entry(path, EntryKind.SYMLINK, 0, self.blobs.get(blob).decode("utf-8", "surrogateescape"))
        return Entry(path, EntryKind.FILE, 0o755 if mode == "100755" else 0o644, blob)

    def _fetch(self, ids: list[str]) -> None:
        data, at = self._git("cat-file", "--batch", given="".join(f"{id}\n" for id in ids).encode()), 0
        for id in ids:
            head, at = data[at : (end := data.index(b"\n", at))].split(), end + 1
            if len(head) != 3:
                raise SnapshotError("the clone lacks some of its files")
            self.known[id] = self.blobs.put(data[at : at + int(head[2])])
            at += int(head[2]) + 1

    def _git(self, *argv: str, given: bytes = b"") -> bytes:
        done = self.jail.run(["git", *argv], stdin=given, timeout=_GIT_S, output_bytes=2 * _MOST_BYTES)
        if not done.ok or done.truncated:
            raise SnapshotError(f"git {argv[0]} failed: {done.last_words.splitlines()[-1]}")
        return done.stdout


def _of_commit(
    commits: _Commits, commit: str, parents: list[str], check: str | None, sandbox: Sandbox, seconds: float
) -> CommitTask | str:
    """The task of a commit, or why there is none."""
    if not parents:
        shallow = commit in commits.history.files.get("shallow", "")
        return "are where a shallow clone ends (git fetch --unshallow)" if shallow else "have no parent"
    changed = commits.changed(parents[0], commit)
    sources, tests = ([path for path in changed if fits(path)] for fits in (is_source, is_test))
    if not sources or not tests:
        return "change no source together with tests"
    old, new = commits.tree(parents[0]), commits.tree(commit)
    before = with_tests_of(old, new)
    hunks = hunks_between(before, new, sources, commits.blobs)
    after = applied(before, hunks, commits.blobs)
    trials = TestTrials(blobs=commits.blobs, sandbox=sandbox, seconds=seconds, limits=Limits())
    if check is not None:
        command, why = check, _refused_check(trials, before, after, check)
    else:
        command, why = _failing_tests(trials, before, after, [path for path in tests if path in new.by_path])
    if why:
        return why
    fix = Fix(source=f"commit {commit}", before=before, hunks=hunks, command=command, blobs=commits.blobs)
    task = fix.task(GENERATOR)
    if (reason := refusal(task, commits.blobs, sandbox)) is not None:
        return f"are refused: {reason}"
    return CommitTask(task=task, commit=commit, solved=after)


def _failing_tests(
    trials: TestTrials, before: Snapshot, after: Snapshot, changed: list[str]
) -> tuple[str, str]:
    """(the shell line of the tests that the change mends, why there are none)."""
    files = [path for path in changed if any(fnmatch(PurePosixPath(path).name, name) for name in TEST_FILES)]
    if not files:
        return "", "change no test file of pytest"
    found, why = trials.fixed(before, after, pytest_line(files, before))
    words = source_words(before, trials.blobs)
    tests = [test for test, outcome in found.items() if not asks_for_feature(outcome, words)]
    return pytest_line(tests, before), why or FEATURE * (not tests)


def _refused_check(trials: TestTrials, before: Snapshot, after: Snapshot, check: str) -> str:
    """Why a user's check does not show a fix: it must fail, pass, and fail again."""
    for tree, passes in ((before, False), (after, True), (before, False)):
        ran = trials.run(tree, check)
        if ran.result.timed_out:
            return "need a check that takes too long"
        if ran.result.ok != passes:
            return f"have a check that does not {'pass' if passes else 'fail before'}"
    outcomes, words = trials.outcomes(before, check), source_words(before, trials.blobs)
    return FEATURE * any(asks_for_feature(outcome, words) for outcome in outcomes.values())
