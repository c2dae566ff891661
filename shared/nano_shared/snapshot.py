"""Content-addressed storage outside the user's git: blobs, and the snapshots of workspaces made of them.

A blob is stored under its `sha256:` id, and verified when it is read. Blobs lie in a folder, in memory, or
in a store that `nano.blob_stores` registers by the scheme of its address. `snapshot_directory` and
`snapshot_tar` take a snapshot; `materialise` writes one into an empty folder.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import json
import os
import re
import stat
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from nano_shared.errors import LogError, UsageError
from nano_shared.extension_points import Extensions, refuse_missing
from nano_shared.files import canonical_json, content_hash, full_disk_explained, replacing, user_path

# ------------------------------------------------------------------------------------ blobs

_ID = re.compile(r"sha256:[0-9a-f]{64}")
# workspaces are snapshotted after each turn: speed matters more than the last tenth of the size
_COMPRESSION = 1
KEPT_SECONDS = 3600.0
"""for which a blob that was put stays, whether or not anything names it: what needs it is logged later"""
_RENEWED = 600.0
"""age at which a blob that is put again is renewed"""


class BlobStore:
    """A folder of zlib-compressed files named by the hash of their content, in two levels of fan-out.

    Safe for any number of threads and processes: a blob appears complete, by rename, and two writers of one
    blob write the same bytes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)
        """where `open_blobs` finds these blobs again"""

    @staticmethod
    def is_id(text: str) -> bool:
        """Whether a text is the id of a blob, stored or not."""
        return _ID.fullmatch(text) is not None

    def path(self, blob: str) -> Path:
        """The file of a blob, whether or not it exists. Raises LogError for an invalid id."""
        if not self.is_id(blob):
            raise LogError(f"{blob!r} is not a blob id; one is 'sha256:' and 64 hexadecimal digits")
        digest = blob.removeprefix("sha256:")
        return self.root / digest[:2] / digest[2:4] / digest[4:]

    def ids(self) -> Iterator[str]:
        """The ids of all blobs, in no order."""
        for path in self.root.glob("??/??/*"):
            blob = "sha256:" + "".join(path.relative_to(self.root).parts)
            if self.is_id(blob):
                yield blob

    def put(self, data: bytes) -> str:
        """Store bytes durably, and return their id; `remove` spares them for an hour.

        Raises LogError when the disk is full or the folder cannot be written.
        """
        blob = content_hash(data)
        target = self.path(blob)
        if not _is_renewed(target):
            with full_disk_explained(self.root):
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with replacing(target) as temporary:
                        temporary.write_bytes(pack(data))
                except PermissionError as error:
                    raise LogError(
                        f"cannot write blobs in {self.root}: {error.strerror}; check its owner"
                    ) from error
        return blob

    def get(self, blob: str) -> bytes:
        """The bytes of a blob, with their hash verified. Raises LogError if it is missing or corrupt."""
        path = self.path(blob)
        try:
            packed = path.read_bytes()
        except FileNotFoundError:
            raise LogError(
                f"blob {blob} is missing: there is no {path}; copy blobs/ along with log.db"
            ) from None
        return unpack(blob, packed, str(path))

    def __contains__(self, blob: str) -> bool:
        return self.path(blob).exists()

    def remove(self, blob: str) -> int | None:
        """Remove a blob that nobody needs. Returns the bytes that it took; None where it stays, since it was
        put within the last hour, or may not be removed."""
        path, before = self.path(blob), time.time() - KEPT_SECONDS
        aside = path.with_name(f"{path.name}.removed")
        try:
            if path.stat().st_mtime > before:
                return None
            path.rename(aside)
            found = aside.stat()
            if found.st_mtime > before:  # another process has put it meanwhile
                aside.rename(path)
                return None
            aside.unlink()
        except FileNotFoundError:
            return 0
        except OSError:
            return None
        return found.st_size


def _is_renewed(path: Path) -> bool:
    """Whether the file is there, and young enough now to be spared by `remove`."""
    with suppress(FileNotFoundError, PermissionError):  # it is written anew
        if time.time() - path.stat().st_mtime > _RENEWED:
            os.utime(path)
        return True
    return False


def pack(data: bytes) -> bytes:
    """Bytes as they are stored."""
    return zlib.compress(data, _COMPRESSION)


def unpack(blob: str, packed: bytes, where: str) -> bytes:
    """The bytes of a blob that is stored at `where`. Raises LogError if they are damaged."""
    try:
        data = zlib.decompress(packed)
    except zlib.error as error:
        raise LogError(f"blob {blob} is corrupt: {where} does not decompress ({error})") from error
    if content_hash(data) != blob:
        raise LogError(
            f"blob {blob} is corrupt: the content of {where} has another hash; restore it from a copy"
        )
    return data


class MemoryBlobs(BlobStore):
    """A BlobStore that keeps every blob in memory."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull, f"{id(self):x}"))  # of its own: equal roots are one store
        self._held: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        blob = content_hash(data)
        self._held[blob] = data
        return blob

    def get(self, blob: str) -> bytes:
        try:
            return self._held[blob]
        except KeyError:
            raise LogError(f"blob {blob} is not among those in memory") from None

    def __contains__(self, blob: str) -> bool:
        return blob in self._held


class OverlayBlobs(MemoryBlobs):
    """Writes to memory, and reads the blobs of another store too, which does not change."""

    def __init__(self, below: BlobStore) -> None:
        super().__init__()
        self._below = below

    def get(self, blob: str) -> bytes:
        return super().get(blob) if super().__contains__(blob) else self._below.get(blob)

    def __contains__(self, blob: str) -> bool:
        return super().__contains__(blob) or blob in self._below


STORES: Extensions[Callable[[str], BlobStore]] = Extensions("nano.blob_stores")
"""by the scheme of an address"""


def open_blobs(address: str | Path) -> BlobStore:
    """The blobs of a folder, or of a store as s3://BUCKET/PREFIX. Raises LogError for another address, and as
    the store does."""
    scheme, found, _ = str(address).partition("://")
    if not found:
        return BlobStore(user_path(address).absolute())
    refuse_missing(STORES.group, scheme)
    if scheme not in STORES:
        raise LogError(f"blobs {address}: name a folder, or an object store by s3://BUCKET/PREFIX")
    return STORES.find(scheme)(str(address))


# -------------------------------------------------------------------------------- snapshots

FORMAT = "nano-snapshot-1"
MODE_BITS = 0o777
"""mode bits that snapshots keep: never setuid"""
MAX_BYTES = 512 * 2**20
MAX_ENTRIES = 200_000
_NAME_BYTES, _PATH_BYTES = 255, 4095  # of Linux
_IMPLIED_MODE = 0o755
_SHOWN = 10

DEFAULT_EXCLUDES = (
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", ".pytest_cache",
    ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs", ".ipynb_checkpoints", ".DS_Store",
    ".nano-apply-*", ".nano",
)  # fmt: skip
"""patterns for names of files or folders at any depth: version control, environments and caches"""


class SnapshotError(UsageError):
    """No snapshot can be taken of a workspace or an archive."""


class Conflict(UsageError):
    """Paths have changed since the snapshot was taken. Nothing was touched."""

    def __init__(self, directory: str, paths: tuple[str, ...]) -> None:
        shown = ", ".join(repr(path) for path in paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
        super().__init__(
            f"{directory}: {len(paths)} path{'s' * (len(paths) != 1)} changed since the snapshot: {shown}; "
            "nothing was touched. Put them back, or merge by hand with the run's diff"
        )
        self.paths = paths


class EntryKind(StrEnum):
    FILE = "file"
    DIRECTORY = "dir"
    SYMLINK = "symlink"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    path: str
    """relative, with slashes; bytes that are not UTF-8 as surrogate escapes, as os.fsdecode gives them"""
    kind: EntryKind
    mode: int
    """permission bits; 0 for symlinks"""
    content: str | None
    """blob id of a file, target of a symlink, None for a directory"""

    @property
    def shown(self) -> str:
        """The path as text for logs and prompts: bytes that are not UTF-8 as `\\xff`."""
        return shown(self.path)


@dataclass(frozen=True)
class Snapshot:
    """Entries sorted by path; every ancestor of an entry has an entry too."""

    entries: tuple[Entry, ...]

    @cached_property
    def by_path(self) -> dict[str, Entry]:
        return {entry.path: entry for entry in self.entries}

    def below(self, path: str) -> dict[str, Entry]:
        """The entries of a path and of what is below it, by path."""
        return {entry.path: entry for entry in self.entries if f"{entry.path}/".startswith(f"{path}/")}

    @property
    def shown_files(self) -> list[str]:
        """Paths of the regular files, invalid UTF-8 bytes escaped."""
        return [entry.shown for entry in self.entries if entry.kind is EntryKind.FILE]


def shown(path: str) -> str:
    """A path with invalid UTF-8 bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def clean_path(name: str) -> str:
    """The path without `.` and repeated slashes; empty for the root. Raises SnapshotError if it leads
    outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    path = "/".join(parts)
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise SnapshotError(f"path {name!r} leads outside the workspace; paths must be relative")
    encoded = path.encode("utf-8", "surrogateescape")
    if len(encoded) > _PATH_BYTES or any(len(part) > _NAME_BYTES for part in encoded.split(b"/")):
        raise SnapshotError(f"path {name[:80]!r}... is longer than a file system takes")
    return path


def make_snapshot(entries: Iterable[Entry]) -> Snapshot:
    """Sort the entries and add the directories that they imply.

    Raises SnapshotError if a path has a parent that is no directory.
    """
    found = {entry.path: entry for entry in entries}
    for path in list(found):
        parent = path.rpartition("/")[0]
        while parent:
            implied = Entry(parent, EntryKind.DIRECTORY, _IMPLIED_MODE, None)
            if found.setdefault(parent, implied).kind is not EntryKind.DIRECTORY:
                raise SnapshotError(f"path {path!r} passes through {parent!r}, which is not a directory")
            parent = parent.rpartition("/")[0]
    return Snapshot(tuple(sorted(found.values())))


def save(snapshot: Snapshot, blobs: BlobStore) -> str:
    rows = [[entry.path, entry.kind, entry.mode, entry.content] for entry in snapshot.entries]
    text = canonical_json({"format": FORMAT, "entries": rows})
    # escaped bytes of file names are lone surrogates, which strict UTF-8 refuses
    return blobs.put(text.encode("utf-8", "surrogatepass"))


def load(snapshot: str | Snapshot, blobs: BlobStore) -> Snapshot:
    """The snapshot with that id; a Snapshot is returned unchanged.

    Raises LogError if the blob is missing or corrupt, SnapshotError if it is no snapshot.
    """
    if isinstance(snapshot, Snapshot):
        return snapshot
    try:
        value = json.loads(blobs.get(snapshot).decode("utf-8", "surrogatepass"))
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, not {FORMAT!r}")
        rows = [Entry(path, EntryKind(kind), mode, content) for path, kind, mode, content in value["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"blob {snapshot} is not a snapshot: {error}") from error
    for entry in rows:
        if not entry.path or clean_path(entry.path) != entry.path:
            raise SnapshotError(f"snapshot {snapshot} holds the path {entry.path!r}, which is not plain")
    return make_snapshot(rows)


def copy(snapshot: str, source: BlobStore, target: BlobStore) -> None:
    """Put a snapshot and its files into another blob store. Raises as `load` does."""
    if snapshot in target or source.root == target.root:
        return
    for entry in load(snapshot, source).entries:
        if entry.kind is EntryKind.FILE:
            target.put(source.get(str(entry.content)))
    target.put(source.get(snapshot))  # last: a stored snapshot implies that its files are stored


def blobs_of(snapshot: str, blobs: BlobStore) -> Iterator[str]:
    """The ids of a snapshot's files. Raises as `load` does."""
    return (str(entry.content) for entry in load(snapshot, blobs).entries if entry.kind is EntryKind.FILE)


def changed_paths(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """Paths that differ, sorted. A created or removed directory is left out if a path in it is listed."""
    return worth_naming(before, after, differing_paths(before, after))


def differing_paths(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """Every path whose entry differs, directories included, sorted."""
    old, new = before.by_path, after.by_path
    return tuple(sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path)))


def worth_naming(before: Snapshot, after: Snapshot, paths: Iterable[str]) -> tuple[str, ...]:
    paths = tuple(paths)
    parents = {path.rpartition("/")[0] for path in paths}

    def implied(path: str) -> bool:
        found = (before.by_path.get(path), after.by_path.get(path))
        came_or_went = None in found and any(entry and entry.kind is EntryKind.DIRECTORY for entry in found)
        return came_or_went and path in parents

    return tuple(path for path in paths if not implied(path))


def name_filter(exclude: Iterable[str]) -> re.Pattern[str]:
    """Matches the names that these patterns leave out of a snapshot."""
    patterns = [fnmatch.translate(pattern) for pattern in exclude]
    return re.compile("|".join(patterns) if patterns else r"(?!)")


EXCLUDED = name_filter(DEFAULT_EXCLUDES)


def is_excluded(path: str) -> bool:
    """Whether the path, or a folder above it, is in DEFAULT_EXCLUDES."""
    return any(EXCLUDED.match(part) for part in path.split("/"))


def materialise(snapshot: str | Snapshot, blobs: BlobStore, directory: Path) -> None:
    """Write every entry below `directory`, which is created if needed, with exact modes.

    Raises SnapshotError if the directory is not empty, LogError if a blob is missing or corrupt.
    """
    tree = load(snapshot, blobs)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise SnapshotError(f"{directory} is not empty; a snapshot is restored into a new or empty directory")
    with full_disk_explained(directory):
        for entry in tree.entries:
            target = os.path.join(directory, entry.path)
            if entry.kind is EntryKind.DIRECTORY:
                os.mkdir(target, 0o700)
            elif entry.kind is EntryKind.SYMLINK:
                os.symlink(str(entry.content), target)
            else:
                _write(target, blobs.get(str(entry.content)), entry.mode)
    # modes last, from the leaves up: a read-only directory would refuse its own contents
    for entry in reversed(tree.entries):
        if entry.kind is EntryKind.DIRECTORY:
            os.chmod(os.path.join(directory, entry.path), entry.mode)


def _write(target: str, data: bytes, mode: int) -> None:
    with open(target, "xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)


# most time is spent waiting for the disk to confirm each new blob: wait for several at once
_WRITERS = 8
_MB = 2**20
_FILE_MODE = 0o644
UNREAD = b"U"
"""type of a tar member that names what could not be read"""
NOTHING = Snapshot(())
_CHANGED_MEANWHILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(slots=True)
class Quota:
    """Bytes that the snapshots of one run may still add to a blob store."""

    left: int = 1 << 30
    """remaining bytes: twice the largest workspace"""

    def take(self, size: int) -> None:
        """Subtract `size`. Raises SnapshotError if less remains."""
        if size > self.left:
            raise SnapshotError(
                f"new and changed files hold {size // _MB} MB, and {self.left // _MB} MB are left "
                "of what one run may keep; delete large files, or nothing of it counts"
            )
        self.left -= size


def snapshot_directory(
    directory: Path,
    blobs: BlobStore,
    exclude: Iterable[str] = DEFAULT_EXCLUDES,
    *,
    max_bytes: int = MAX_BYTES,
    unread: Callable[[str], None] | None = None,
) -> str:
    """Snapshot a directory; returns its id. Symlinks are kept as links; sockets, pipes and devices are left
    out.

    `unread` gets the path of each file or folder that this user may not read, which is then left out. Raises
    SnapshotError for a missing directory, more than `max_bytes`, and without `unread` for an unreadable path.
    """
    if not directory.is_dir():
        raise SnapshotError(f"no such directory: {directory}")

    def refused(error: PermissionError) -> None:
        path = os.path.relpath(str(error.filename), directory)
        if unread is None or path == ".":
            way = f"make it readable or move it out of {directory}"
            raise SnapshotError(f"cannot read {error.filename}: {error.strerror}; {way}") from error
        unread(path)

    def read(item: tuple[str, os.stat_result]) -> Entry | PermissionError | None:
        try:
            return _read_entry(directory, *item, blobs)
        except PermissionError as error:
            return error

    found = list(_walk(os.fspath(directory), name_filter(exclude), refused))
    _check_size(directory, found, max_bytes)
    entries = []
    with ThreadPoolExecutor(_WRITERS) as pool:
        for entry in pool.map(read, found):
            if isinstance(entry, PermissionError):
                refused(entry)
            elif entry is not None:
                entries.append(entry)
    return save(make_snapshot(entries), blobs)


def snapshot_tar(
    stream: bytes,
    blobs: BlobStore,
    *,
    max_bytes: int = MAX_BYTES,
    quota: Quota | None = None,
    before: Snapshot = NOTHING,
    left_out: Callable[[str], object] = str,
) -> str:
    """Snapshot an uncompressed, untrusted tar stream; returns its id.

    `left_out` gets the paths of pipes, and of members of the type UNREAD: of these and what is below them the
    snapshot holds what `before` does. Raises SnapshotError for absolute names, `..`, devices, hard links to
    missing members, paths through files or symlinks, damage, more than `max_bytes`, or more new bytes than
    `quota` has left.
    """
    entries: dict[str, Entry] = {}
    pending: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(stream), mode="r:", errors="surrogateescape") as archive:
            budget = max_bytes
            for member in archive:
                path = clean_path(member.name)
                if not path or is_excluded(path):
                    continue
                if member.isfifo() or member.type == UNREAD:
                    left_out(path)
                    if member.type == UNREAD:
                        entries = {**before.below(path), **entries}
                    continue
                budget -= _claimed_size(member, len(entries), budget, max_bytes)
                entries[path] = _tar_entry(archive, member, path, entries, pending)
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError) as error:
        raise SnapshotError(f"the workspace's archive is damaged: {error}") from error
    new = [data for blob, data in pending.items() if blob not in blobs]
    if quota is not None:
        quota.take(sum(map(len, new)))
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(blobs.put, new))
    return save(make_snapshot(entries.values()), blobs)


def snapshot_texts(texts: Mapping[str, str], blobs: BlobStore, *, max_bytes: int = MAX_BYTES) -> str:
    """Snapshot plain files, given as text by name; returns its id.

    Raises SnapshotError for a name that leads outside, a file below a file, a text that cannot be encoded, or
    more than `max_bytes`.
    """
    entries = []
    left = max_bytes
    for name, text in texts.items():
        path = clean_path(name)
        if is_excluded(path):
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError as problem:
            raise SnapshotError(f"file {name!r} holds no text: {problem}") from None
        left -= len(data)
        if not path or name.endswith("/") or left < 0:
            raise SnapshotError(
                f"file {name!r} goes over the {max_bytes // _MB} MB that a workspace may hold"
                if left < 0
                else f"file {name!r} has the name of a folder"
            )
        entries.append(Entry(path, EntryKind.FILE, _FILE_MODE, blobs.put(data)))
    return save(make_snapshot(entries), blobs)


def _walk(
    root: str, excluded: re.Pattern[str], refused: Callable[[PermissionError], None]
) -> Iterator[tuple[str, os.stat_result]]:
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as listing:
                items = [item for item in listing if not excluded.match(item.name)]
            found = [(item, item.stat(follow_symlinks=False)) for item in items]
        except PermissionError as error:
            error.filename = os.path.join(root, folder)  # of a folder that may be listed, its first file
            refused(error)
            continue
        for item, status in found:
            path = f"{folder}/{item.name}" if folder else item.name
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            yield path, status


def _check_size(directory: Path, found: list[tuple[str, os.stat_result]], max_bytes: int) -> None:
    if len(found) > MAX_ENTRIES:
        raise SnapshotError(
            f"{directory} holds {len(found)} files and folders, over the {MAX_ENTRIES} that a workspace may "
            "hold; work in a smaller directory"
        )
    files = [(status.st_size, path) for path, status in found if stat.S_ISREG(status.st_mode)]
    total = sum(size for size, _ in files)
    if total > max_bytes:
        largest, path = max(files)
        raise SnapshotError(
            f"{directory} holds {total // _MB} MB, over the {max_bytes // _MB} MB that a workspace may hold "
            f"(largest: {path}, {largest // _MB} MB); work in a smaller directory, move large files"
            " out, or raise the setting workspace_mb"
        )


def _read_entry(directory: Path, path: str, status: os.stat_result, blobs: BlobStore) -> Entry | None:
    """The entry; None if it changed since it was listed, and for anything but files, directories and
    links."""
    full, mode = os.path.join(directory, path), status.st_mode
    try:
        if stat.S_ISLNK(mode):
            return Entry(path, EntryKind.SYMLINK, 0, os.readlink(full))
        if stat.S_ISDIR(mode):
            return Entry(path, EntryKind.DIRECTORY, mode & MODE_BITS, None)
        if stat.S_ISREG(mode):
            with open(full, "rb", opener=_open_without_following) as file:
                return Entry(path, EntryKind.FILE, mode & MODE_BITS, blobs.put(file.read()))
    except OSError as error:
        if error.errno not in _CHANGED_MEANWHILE:
            raise
    return None


def _open_without_following(path: str, flags: int) -> int:
    # the workspace is live: between listing and opening, a file may become a link or a pipe
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _claimed_size(member: tarfile.TarInfo, entries: int, budget: int, max_bytes: int) -> int:
    if member.size < 0 or member.size > budget:
        raise SnapshotError(
            f"the workspace outgrew {max_bytes // _MB} MB at {member.name!r} ({member.size} bytes); "
            "delete large files (setting workspace_mb)"
        )
    if entries >= MAX_ENTRIES:
        raise SnapshotError(f"the workspace outgrew {MAX_ENTRIES} files and folders; delete some")
    return member.size


def _tar_entry(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: str,
    entries: dict[str, Entry],
    pending: dict[str, bytes],
) -> Entry:
    mode = member.mode & MODE_BITS
    if member.isdir():
        return Entry(path, EntryKind.DIRECTORY, mode, None)
    if member.issym():
        if not member.linkname or "\0" in member.linkname:
            raise SnapshotError(f"symlink {path!r} has the target {member.linkname!r}")
        return Entry(path, EntryKind.SYMLINK, 0, member.linkname)
    if member.islnk():
        original = entries.get(clean_path(member.linkname))
        if original is None or original.kind is not EntryKind.FILE:
            raise SnapshotError(
                f"hard link {path!r} names {member.linkname!r}, which the archive does not hold"
            )
        return Entry(path, EntryKind.FILE, original.mode, original.content)
    file = archive.extractfile(member) if member.isreg() else None
    if file is None:
        raise SnapshotError(f"{path!r} is a device or of an unknown type; a workspace holds files and links")
    data = file.read()
    blob = content_hash(data)
    pending[blob] = data
    return Entry(path, EntryKind.FILE, mode, blob)
