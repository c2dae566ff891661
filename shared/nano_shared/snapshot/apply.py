"""Bringing the change between two snapshots to a directory: all of it, or nothing on a conflict."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.snapshot.anchored import AnchoredDirectory, naming
from nano_shared.snapshot.tree import (
    Conflict,
    Entry,
    Kind,
    Snapshot,
    SnapshotError,
    differing_paths,
    load,
    worth_naming,
)

_OWNER = 0o700


@dataclass(frozen=True, slots=True)
class _Change:
    """One path that is not yet as it should be."""

    path: str
    now: Entry | None
    after: Entry | None

    @property
    def opens_directory(self) -> bool:
        return _is_directory(self.now)

    @property
    def removes(self) -> bool:
        """Something stands there that no rename can replace."""
        return self.now is not None and (
            self.after is None or _is_directory(self.now) != _is_directory(self.after)
        )

    @property
    def places(self) -> bool:
        return self.after is not None and not _is_directory(self.after)


def apply(
    before: str | Snapshot,
    after: str | Snapshot,
    blobs: BlobStore,
    directory: Path,
    *,
    guard: Iterable[str] = (),
) -> list[str]:
    """Change `directory` as `before` became `after`; give the paths it changed.

    Touches only paths that differ between the two. Each must still be as in `before` (or already as in
    `after`, so that an apply that was killed can be run again); otherwise Conflict lists all that are not,
    and nothing is touched. The same holds for the paths of `guard`, which need not differ. Files appear
    complete, by rename. A directory that should go stays where it holds files that no snapshot knows, or
    has another mode than in `before`; one that should come may be there already, with any mode. Raises
    LogError for a missing or corrupt blob before any change, UsageError where the system refuses a change.
    """
    old, new, guarded = load(before, blobs), load(after, blobs), frozenset(guard)
    if not directory.is_dir():
        raise SnapshotError(f"no such directory: {directory}")
    try:
        with AnchoredDirectory(directory) as root:
            changes = _plan(old, new, guarded, root, directory)
            if changes:
                with _staged(changes, blobs, root) as staging:
                    _refuse_news(changes, _plan(old, new, guarded, root, directory), directory)
                    _execute(changes, root, staging, directory)
    except OSError as error:
        raise UsageError(
            f"{directory}: cannot change {str(error.filename)!r}: {error.strerror}; "
            "mend that and try again: paths that are done are passed over"
        ) from error
    return list(worth_naming(old, new, [change.path for change in changes]))


def _plan(
    old: Snapshot, new: Snapshot, guarded: frozenset[str], root: AnchoredDirectory, directory: Path
) -> list[_Change]:
    conflicts: set[str] = set()
    changes: dict[str, _Change] = {}
    differing = set(differing_paths(old, new))
    watched = differing | guarded
    for path in sorted(watched):
        before, after = old.by_path.get(path), new.by_path.get(path)
        if after is not None:
            conflicts.update(_blocked_parents(path, watched, root))
        try:
            with naming(path):
                now = root.entry(path)
        except (PermissionError, ValueError):
            conflicts.add(path)
            continue
        if now == after or _stays(_Change(path, now, after), before, root, exactly=path in guarded):
            continue
        if not _expected(now, before):
            conflicts.add(path)
        elif _is_directory(now) and after is not None and not _is_directory(after):
            conflicts.update(_strangers(path, old, root))
        if path in differing:
            changes[path] = _Change(path, now, after)
    if conflicts:
        raise Conflict(str(directory), tuple(sorted(conflicts)))
    for path in changes:
        if path.rpartition("/")[0] not in changes:
            root.check_parent_writable(path)
    return list(changes.values())


def _refuse_news(planned: list[_Change], again: list[_Change], directory: Path) -> None:
    """Raises Conflict for what somebody changed while the new files were being written."""
    news = {change.path for change in {*planned} ^ {*again}}
    if news:
        raise Conflict(str(directory), tuple(sorted(news)))


def _blocked_parents(path: str, watched: set[str], root: AnchoredDirectory) -> Iterator[str]:
    """Ancestors that both snapshots hold as directories, and that no longer are ones."""
    parent = path.rpartition("/")[0]
    while parent:
        if parent not in watched and not _is_directory(root.entry(parent)):
            yield parent
        parent = parent.rpartition("/")[0]


def _strangers(path: str, old: Snapshot, root: AnchoredDirectory) -> Iterator[str]:
    """What a directory and those inside it hold that the snapshot does not."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for child in root.children(path):
            known = old.by_path.get(child)
            if known is None:
                yield child
            elif _is_directory(known):
                yield from _strangers(child, old, root)


def _stays(change: _Change, before: Entry | None, root: AnchoredDirectory, *, exactly: bool) -> bool:
    """A directory that the user made, or keeps something in, is no conflict: it is left as it is.

    Not so where the whole must be `exactly` as before: there only one that has something in it may be left.
    """
    now, after = change.now, change.after
    if not _is_directory(now) or not (after is None or _is_directory(after)):
        return False
    if before is None and after is None:
        return bool(root.children(change.path))
    changed = after is None and _is_directory(before) and not _expected(now, before)
    return not exactly and (before is None or changed)


def _expected(now: Entry | None, before: Entry | None) -> bool:
    if now is not None and before is not None and _is_directory(now) and _is_directory(before):
        # An apply that was killed may have left its owner's bits on.
        return now.mode in (before.mode, before.mode | _OWNER)
    return now == before


@contextmanager
def _staged(changes: list[_Change], blobs: BlobStore, root: AnchoredDirectory) -> Iterator[dict[str, str]]:
    """Every new file and link, written under a temporary folder of the directory: path -> staged path.

    A full disk or a corrupt blob is met here, before anything of the user's is touched.
    """
    folder = f".nano-apply-{secrets.token_hex(6)}"
    with naming(f"a new folder {folder}"):
        root.make_directory(folder)
    staging: dict[str, str] = {}
    try:
        for number, change in enumerate(changes):
            if change.after is None or not change.places:
                continue
            staged = f"{folder}/{number}"
            staging[change.path] = staged
            with naming(change.path):
                if change.after.kind is Kind.SYMLINK:
                    root.link(staged, str(change.after.content))
                else:
                    root.write(staged, blobs.get(str(change.after.content)), change.after.mode)
        yield staging
    finally:
        for leftover in root.children(folder):
            root.remove(leftover)
        root.remove_directory(folder)


def _execute(
    changes: list[_Change], root: AnchoredDirectory, staging: dict[str, str], directory: Path
) -> None:
    """Open directories, remove from the leaves up, place from the root down, then set directories' modes."""
    modes: dict[str, int] = {}
    for change in changes:
        if change.now is not None and change.opens_directory:
            modes[change.path] = change.now.mode
            with naming(change.path):
                root.set_directory_mode(change.path, change.now.mode | _OWNER)
    for change in reversed(changes):
        with naming(change.path):
            if change.removes and _remove(change, root, directory):
                modes.pop(change.path, None)
    for change in changes:
        with naming(change.path):
            if change.places:
                root.move(staging[change.path], change.path)
            elif change.after is not None:
                if not change.opens_directory:
                    root.make_directory(change.path)
                modes[change.path] = change.after.mode
    for path in sorted(modes, reverse=True):
        with naming(path):
            root.set_directory_mode(path, modes[path])


def _remove(change: _Change, root: AnchoredDirectory, directory: Path) -> bool:
    if not change.opens_directory:
        root.remove(change.path)
        return True
    try:
        root.remove_directory(change.path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if change.after is not None:  # filled since the plan was made
            raise Conflict(str(directory), tuple(root.children(change.path))) from error
        return False
    return True


def _is_directory(entry: Entry | None) -> bool:
    return entry is not None and entry.kind is Kind.DIRECTORY


def undo(
    stages: Sequence[str | Snapshot], target: str | Snapshot, blobs: BlobStore, directory: Path
) -> list[str]:
    """Take `directory` back to `target` from the first of `stages` that it is at; give the paths it changed.

    `stages`, newest first, are the snapshots that came after `target`. A directory is at one where every
    path that any of them changed is as that one (or already as `target`) has it: so a directory that was
    taken back to the middle, or got an unfinished change, is taken back from there. Raises as apply does:
    Conflict names the paths that are unlike the newest, and nothing is touched.
    """
    known, after = [load(stage, blobs) for stage in stages], load(target, blobs)
    touched = {path for stage in known for path in differing_paths(stage, after)}
    for stage in known:
        try:
            return apply(stage, after, blobs, directory, guard=touched)
        except Conflict:
            continue
    return apply(known[0], after, blobs, directory) if known else []
