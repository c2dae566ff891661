"""The change between two snapshots: as a diff that `git apply` takes, applied to a directory, and undone."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import secrets
import stat
import string
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.snapshot import (
    MODE_BITS,
    BlobStore,
    Conflict,
    Entry,
    EntryKind,
    Snapshot,
    SnapshotError,
    differing_paths,
    load,
    worth_naming,
)

_CONTEXT = 3
_MAX_BYTES, _MAX_PATCHES = 2**20, 2**24
# pairs of equal lines that the matcher may visit; beyond that, the changed region is replaced as a whole
_MAX_PAIRS = 1_000_000
_HASH_DIGITS = 7
_LINE, _LENGTHS = 52, string.ascii_uppercase + string.ascii_lowercase
_FILE_TYPE, _LINK_MODE = 0o100000, 0o120000
_PLAIN_NAME = re.compile(r'[^\x00-\x1f"\\\x7f\ud800-\udfff]+')


def diff(before: str | Snapshot, after: str | Snapshot, blobs: BlobStore, *, whole: bool = False) -> str:
    """Git-style unified diff; empty if nothing differs.

    Binary files, files that are no UTF-8 and files over 1 MiB are named without contents, and so is
    everything after 16 MiB of patches; `whole` gives them as git's binary patches, which `git apply` takes.
    Git has no entries for directories, and of a file's mode only whether its owner may execute it. Empty
    directories and other changes of modes are `#` lines at the top, which `git apply` ignores.
    """
    old, new = load(before, blobs), load(after, blobs)
    paths = differing_paths(old, new)
    notes: list[str] = []
    for path in worth_naming(old, new, paths):
        notes.extend(_note(path, old.by_path.get(path), new.by_path.get(path)))
    patches: list[str] = []
    room = None if whole else _MAX_PATCHES
    for path in paths:
        patches.append(_patch(_not_directory(old, path), _not_directory(new, path), blobs, room))
        if room is None:
            continue
        room -= len(patches[-1])
    return "".join(notes) + "".join(patches)


def _not_directory(snapshot: Snapshot, path: str) -> Entry | None:
    entry = snapshot.by_path.get(path)
    return None if entry is None or entry.kind is EntryKind.DIRECTORY else entry


def _note(path: str, old: Entry | None, new: Entry | None) -> Iterator[str]:
    was = old is not None and old.kind is EntryKind.DIRECTORY
    is_now = new is not None and new.kind is EntryKind.DIRECTORY
    if old and new and old.kind is new.kind:
        if old.mode != new.mode and (is_now or _mode(old) == _mode(new)):
            kind = "directory" if is_now else "file"
            yield f"# {kind} mode {old.mode:o} -> {new.mode:o}: {_quoted(path)}\n"
    elif was and new is None:
        yield f"# directory removed: {_quoted(path)}\n"
    elif is_now and old is None:
        yield f"# directory created: {_quoted(path)}\n"


def _patch(old: Entry | None, new: Entry | None, blobs: BlobStore, room: int | None) -> str:
    """The patch of one path. `room`: characters that are left; None for a patch with all contents."""
    if old and new and old.kind is not new.kind:
        return _patch(old, None, blobs, room) + _patch(None, new, blobs, room)
    known = old or new
    if known is None or (old and new and old.content == new.content and _mode(old) == _mode(new)):
        return ""
    left, right = _quoted(f"a/{known.path}"), _quoted(f"b/{known.path}")
    header = f"diff --git {left} {right}\n" + _mode_lines(old, new)
    if old and new and old.content == new.content:
        return header
    data = _data(old, blobs), _data(new, blobs)
    texts = _text(data[0]), _text(data[1])
    binary = None in texts or max(map(len, data)) > _MAX_BYTES
    digits = 40 if binary and room is None else _HASH_DIGITS
    header += f"index {_git_hash(old, data[0], digits)}..{_git_hash(new, data[1], digits)}"
    header += f" {_mode(new):06o}\n" if old and new and _mode(old) == _mode(new) else "\n"
    if binary and room is None:
        return f"{header}GIT binary patch\n{_literal(data[1])}\n{_literal(data[0])}\n"
    left, right = left if old else "/dev/null", right if new else "/dev/null"
    if texts[0] is None or texts[1] is None:
        return header + f"Binary files {left} and {right} differ\n"
    if binary or (room is not None and max(map(len, data)) > room):
        return header + f"Large files {left} and {right} differ ({len(data[0])} and {len(data[1])} bytes)\n"
    hunks = "".join(_hunks(texts[0], texts[1]))
    names = f"--- {_ended(left)}\n+++ {_ended(right)}\n"
    return header + (names + hunks if hunks else "")


def _mode_lines(old: Entry | None, new: Entry | None) -> str:
    if old and new:
        return "" if _mode(old) == _mode(new) else f"old mode {_mode(old):06o}\nnew mode {_mode(new):06o}\n"
    if new:
        return f"new file mode {_mode(new):06o}\n"
    return f"deleted file mode {_mode(old):06o}\n" if old else ""


def _mode(entry: Entry) -> int:
    if entry.kind is EntryKind.SYMLINK:
        return _LINK_MODE
    return _FILE_TYPE | (0o755 if entry.mode & 0o100 else 0o644)


def _git_hash(entry: Entry | None, data: bytes, digits: int) -> str:
    """Git's hash of the content, which git compares with the file before it applies a binary patch."""
    if entry is None:
        return "0" * digits
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()[:digits]


def _literal(data: bytes) -> str:
    """A content as git's binary patches hold it: deflated, in lines of 52 bytes behind a letter for their
    number."""
    packed = zlib.compress(data)
    lines = [packed[at : at + _LINE] for at in range(0, len(packed), _LINE)]
    rows = (_LENGTHS[len(line) - 1] + base64.b85encode(line, pad=True).decode() for line in lines)
    return f"literal {len(data)}\n" + "".join(f"{row}\n" for row in rows)


def _data(entry: Entry | None, blobs: BlobStore) -> bytes:
    if entry is None:
        return b""
    content = str(entry.content)
    if entry.kind is EntryKind.SYMLINK:
        return content.encode("utf-8", "surrogateescape")
    return blobs.get(content)


def _text(data: bytes) -> str | None:
    """The text; None for a binary file: one with NUL bytes, or not UTF-8."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _quoted(name: str) -> str:
    """A name as git writes it: plain, or quoted with escapes if a byte could be misread."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    escaped = []
    for byte in name.encode("utf-8", "surrogateescape"):
        character = chr(byte)
        plain = 0x20 <= byte < 0x7F and character not in '"\\'
        escaped.append(character if plain else f"\\{byte:03o}")
    return '"' + "".join(escaped) + '"'


def _ended(name: str) -> str:
    # a name with spaces needs a tab at its end
    return f"{name}\t" if " " in name and not name.startswith('"') else name


class _Coarse(SequenceMatcher[str]):
    """A matcher that replaces everything between the common ends, for files that take too long line by
    line."""

    def __init__(self, left: list[str], right: list[str]) -> None:
        super().__init__(None, left, right)
        self._left, self._right = left, right

    def get_opcodes(self) -> list[tuple[str, int, int, int, int]]:  # type: ignore[override]
        left, right = self._left, self._right
        head = _common(left, right)
        tail = _common(left[head:][::-1], right[head:][::-1])
        i, j = len(left) - tail, len(right) - tail
        codes = [
            ("equal", 0, head, 0, head),
            ("replace", head, i, head, j),
            ("equal", i, i + tail, j, j + tail),
        ]
        return [code for code in codes if code[2] > code[1] or code[4] > code[3]]


def _matcher(left: list[str], right: list[str]) -> SequenceMatcher[str]:
    counts, popular = Counter(right), len(right) // 100 + 1
    # SequenceMatcher ignores popular lines in texts of 200 lines or more
    rare = {line: n for line, n in counts.items() if n <= popular or len(right) < 200}
    pairs = sum(rare.get(line, 0) for line in left)
    return SequenceMatcher(None, left, right) if pairs <= _MAX_PAIRS else _Coarse(left, right)


def _common(left: list[str], right: list[str]) -> int:
    """Number of leading lines in common."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))


def _hunks(old: str, new: str) -> Iterator[str]:
    left, right = _lines(old), _lines(new)
    for group in _matcher(left, right).get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (_line(" ", line) for line in left[i1:i2])
            else:
                yield from (_line("-", line) for line in left[i1:i2])
                yield from (_line("+", line) for line in right[j1:j2])


def _lines(text: str) -> list[str]:
    # str.splitlines would also split at form feeds and the like, which git does not treat as line ends
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _line(sign: str, line: str) -> str:
    return sign + line if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"


def _range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


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
