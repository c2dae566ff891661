"""Applies the change between two snapshots to a directory: all of it, or nothing on a conflict."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.snapshot.tree import (
    MODE_BITS,
    Conflict,
    Entry,
    EntryKind,
    Snapshot,
    SnapshotError,
    differing_paths,
    load,
    worth_naming,
)

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# entering a directory needs no permission to list it
_PASSING = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Sets `path` as the file name of an OSError whose call knew only a part of it or a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


class AnchoredDirectory:
    """A directory whose files are accessed beneath it, without following symlinks.

    Paths are relative with slashes, as in Entry. Methods raise OSError as the calls they wrap do.
    """

    def __init__(self, directory: Path) -> None:
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> AnchoredDirectory:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._root)

    def entry(self, path: str) -> Entry | None:
        """The current entry of a path, with its content hashed; None if there is nothing.

        What this user owns is read whatever its permissions. Raises PermissionError for another's unreadable
        file, ValueError for a pipe, a socket or a device.
        """
        try:
            try:
                return self._entry(path)
            except PermissionError:
                with self._unlocked(path) as mode:
                    found = self._entry(path)
                return found and replace(found, mode=mode & MODE_BITS)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _entry(self, path: str) -> Entry:
        with self._parent(path) as (parent, name):
            return _entry_at(parent, name, path)

    def children(self, path: str) -> list[str]:
        try:
            return self._children(path)
        except PermissionError:
            with self._unlocked(path):
                return self._children(path)

    def _children(self, path: str) -> list[str]:
        with self._parent(path) as (parent, name), _opened(parent, name, os.O_RDONLY | _FOLDER) as folder:
            return [f"{path}/{child}" for child in os.listdir(folder)]

    @contextmanager
    def _unlocked(self, path: str) -> Iterator[int]:
        """Let the owner read a path, and pass the folders above it, meanwhile. Yields the path's own mode.

        Raises PermissionError for what another user owns.
        """
        with ExitStack() as stack:
            folder, mode = os.dup(self._root), 0
            stack.callback(os.close, folder)
            for name in path.split("/"):
                folder = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                stack.callback(os.close, folder)
                mode = os.fstat(folder).st_mode
                if not stat.S_ISLNK(mode) and mode & 0o500 != 0o500:
                    place = f"/proc/self/fd/{folder}"  # fchmod refuses O_PATH descriptors
                    os.chmod(place, stat.S_IMODE(mode) | 0o500)
                    stack.callback(os.chmod, place, stat.S_IMODE(mode))
            yield mode

    def check_parent_writable(self, path: str) -> None:
        """Raises PermissionError if this user may not change the contents of a path's parent."""
        with suppress(FileNotFoundError, NotADirectoryError), self._parent(path) as (parent, _):
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=parent):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def make_directory(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.mkdir(name, 0o700, dir_fd=parent)

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Create a file durably."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            self._parent(path) as (parent, name),
            open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file,
        ):
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())

    def link(self, path: str, target: str) -> None:
        with self._parent(path) as (parent, name):
            os.symlink(target, name, dir_fd=parent)

    def move(self, source: str, target: str) -> None:
        """Replace what is at `target`, atomically."""
        with self._parent(source) as (old, old_name), self._parent(target) as (new, new_name):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def remove(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def remove_directory(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def set_directory_mode(self, path: str, mode: int) -> None:
        with self._parent(path) as (parent, name), _opened(parent, name, _PASSING) as folder:
            # snapshots do not record setgid and sticky bits: keep those of the user's directory
            mode |= os.fstat(folder).st_mode & ~MODE_BITS & 0o7777
            # through /proc, since fchmod refuses O_PATH descriptors
            os.chmod(f"/proc/self/fd/{folder}", mode)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        *folders, name = path.split("/")
        parent = os.dup(self._root)
        try:
            for folder in folders:
                inner = os.open(folder, _PASSING, dir_fd=parent)
                os.close(parent)
                parent = inner
            yield parent, name
        finally:
            os.close(parent)


@contextmanager
def _opened(parent: int, name: str, flags: int) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _entry_at(parent: int, name: str, path: str) -> Entry:
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        return Entry(path, EntryKind.SYMLINK, 0, os.readlink(name, dir_fd=parent))
    if stat.S_ISDIR(mode):
        return Entry(path, EntryKind.DIRECTORY, mode & MODE_BITS, None)
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path!r} is a pipe, a socket or a device")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=parent), "rb") as file:
        return Entry(path, EntryKind.FILE, mode & MODE_BITS, content_hash(file.read()))


_OWNER = 0o700


@dataclass(frozen=True, slots=True)
class _Change:
    """One path that differs from the wanted state."""

    path: str
    now: Entry | None
    after: Entry | None

    @property
    def opens_directory(self) -> bool:
        return _is_directory(self.now)

    @property
    def removes(self) -> bool:
        """Whether a rename cannot replace what is there."""
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
    """Change `directory` as `before` became `after`; returns the changed paths.

    Touches only paths that differ between the two. Each must still be as in `before` (or already as in
    `after`, so that an interrupted apply can be repeated); otherwise raises Conflict with all that are not,
    before touching anything. The same holds for the paths of `guard`, which need not differ. Files appear
    complete, by rename. A directory that should be removed stays if it holds files that no snapshot knows, or
    has another mode than in `before`; one that should be created may exist already, with any mode. Raises
    LogError for a missing or corrupt blob before any change, UsageError if the system refuses a change.
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
    """Raises Conflict for paths that changed while the new files were being written."""
    news = {change.path for change in {*planned} ^ {*again}}
    if news:
        raise Conflict(str(directory), tuple(sorted(news)))


def _blocked_parents(path: str, watched: set[str], root: AnchoredDirectory) -> Iterator[str]:
    """Ancestors that are directories in both snapshots, but no longer in the folder."""
    parent = path.rpartition("/")[0]
    while parent:
        if parent not in watched and not _is_directory(root.entry(parent)):
            yield parent
        parent = parent.rpartition("/")[0]


def _strangers(path: str, old: Snapshot, root: AnchoredDirectory) -> Iterator[str]:
    """Files below a directory that the snapshot does not contain."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for child in root.children(path):
            known = old.by_path.get(child)
            if known is None:
                yield child
            elif _is_directory(known):
                yield from _strangers(child, old, root)


def _stays(change: _Change, before: Entry | None, root: AnchoredDirectory, *, exactly: bool) -> bool:
    """Whether a directory that differs is left as it is: one that the user made, or keeps files in.

    If the state must be `exactly` as before, only a non-empty directory is left.
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
        # an interrupted apply may have left the owner's permission bits set
        return now.mode in (before.mode, before.mode | _OWNER)
    return now == before


@contextmanager
def _staged(changes: list[_Change], blobs: BlobStore, root: AnchoredDirectory) -> Iterator[dict[str, str]]:
    """Write every new file and link under a temporary folder of the directory. Returns path -> staged path.

    Detects a full disk or a corrupt blob before any file of the user is touched.
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
                if change.after.kind is EntryKind.SYMLINK:
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
    return entry is not None and entry.kind is EntryKind.DIRECTORY


def undo(
    stages: Sequence[str | Snapshot], target: str | Snapshot, blobs: BlobStore, directory: Path
) -> list[str]:
    """Take `directory` back to `target` from the first of `stages` that it is at; returns the changed paths.

    `stages`, newest first, are the snapshots after `target`. A directory is at a stage if every path that any
    stage changed is as in that stage (or already as in `target`): so a directory that was taken back halfway,
    or got an unfinished change, is taken back too. Raises as `apply` does: Conflict names the paths that
    differ from the newest stage, and nothing is touched.
    """
    known, after = [load(stage, blobs) for stage in stages], load(target, blobs)
    touched = {path for stage in known for path in differing_paths(stage, after)}
    for stage in known:
        try:
            return apply(stage, after, blobs, directory, guard=touched)
        except Conflict:
            continue
    return apply(known[0], after, blobs, directory) if known else []
