"""Workspaces, by trusted code inside the jail: file operations that never leave them, and their tar streams.

The reader and writer of tar streams are several times faster than `tarfile`, which creates an object with
thirty fields for each member. The streams are compatible with `tarfile` in both directions.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple, Self, TypeVar, cast

from . import kernel

EPOCH = 1_577_836_800
"""modification time of every file in an archive: 2020-01-01, so that equal trees give equal streams"""

FILE, SYMLINK, DIRECTORY = b"0", b"2", b"5"
PIPE, UNREAD = b"6", b"U"
"""what an archive only names: pipes, sockets and devices; files and folders that cannot be read"""
_HARD_LINK, _OLD_FILE, _CONTIGUOUS = b"1", b"\0", b"7"
_FILES = (FILE, _OLD_FILE, _CONTIGUOUS)
_LONG_NAME, _LONG_LINK = b"L", b"K"
_NAMES = {_LONG_NAME: "path", _LONG_LINK: "linkpath"}
_EXTENDED, _EXTENDED_FOR_ALL = b"x", b"g"
_BLOCK = 512
_CHUNK = 1 << 20
_SHORT_NAME = 100
_LONGEST_HEADER = 1 << 16
"""bytes of a name or of an extended header; Linux allows paths of 4096"""
_LARGEST = 1 << 33
"""sizes from here on do not fit eleven octal digits"""
# fields with the same value in every member: owner and group; then time and blanks for the checksum
_OWNER = b"0000000\0" * 2
_TIME = b"%011o\0" % EPOCH + b" " * 8
_MAGIC = b"ustar  \0"
_NOTHING = bytes(_BLOCK)


class TarMember(NamedTuple):
    """One member of an archive; a file's contents follow it in the stream."""

    name: str
    kind: bytes
    """FILE, SYMLINK, DIRECTORY, or the type byte of an unsupported kind"""
    mode: int
    size: int = 0
    target: str = ""


# -------------------------------------------------------------------------------------- writing


def write_member(out: IO[bytes], member: TarMember) -> None:
    """Write the header of a member; the caller writes a file's contents and then `write_padding`."""
    name, target = os.fsencode(member.name), os.fsencode(member.target)
    for kind, text in ((_LONG_LINK, target), (_LONG_NAME, name)):
        if len(text) > _SHORT_NAME:
            out.write(_header(b"././@LongLink", kind, 0, len(text) + 1, b"") + text + b"\0")
            write_padding(out, len(text) + 1)
    out.write(_header(name[:_SHORT_NAME], member.kind, member.mode, member.size, target[:_SHORT_NAME]))


def write_padding(out: IO[bytes], size: int) -> None:
    """Pad contents of `size` bytes to whole blocks."""
    if rest := size % _BLOCK:
        out.write(bytes(_BLOCK - rest))


def write_end(out: IO[bytes]) -> None:
    out.write(_NOTHING * 2)


def _header(name: bytes, kind: bytes, mode: int, size: int, target: bytes) -> bytes:
    length = b"%011o\0" % size if size < _LARGEST else b"\x80" + size.to_bytes(11, "big")
    before = name.ljust(_SHORT_NAME, b"\0") + b"%07o\0" % mode + _OWNER + length + _TIME
    block = (before + kind + target.ljust(_SHORT_NAME, b"\0") + _MAGIC).ljust(_BLOCK, b"\0")
    # the checksum field itself counts as blanks
    return block[:148] + b"%06o\0 " % _sum(block) + block[156:]


def _sum(block: bytes) -> int:
    """Sum of the bytes of a block. The lower half of Adler-32 is that sum plus one, while it is below
    65521."""
    first, second = zlib.adler32(block[:256]), zlib.adler32(block[256:])
    return (first & 0xFFFF) + (second & 0xFFFF) - 2


# -------------------------------------------------------------------------------------- reading


class TarReader:
    """Reads the members of an untrusted archive in order; allocates nothing by a claimed size."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._left = 0
        """bytes of the current member's contents not yet read"""
        self._padding = 0

    def __iter__(self) -> Iterator[TarMember]:
        """Yield the members. Raises OSError (EINVAL) for a damaged or truncated archive."""
        extended: dict[str, str] = {}
        while (block := self._next_block()) is not None:
            kind, size = block[156:157], _number(block[124:136])
            self._left, self._padding = size, -size % _BLOCK
            if kind in _NAMES:
                extended[_NAMES[kind]] = os.fsdecode(self._text(size).split(b"\0", 1)[0])
            elif kind == _EXTENDED:
                extended.update(_records(self._text(size)))
            elif kind != _EXTENDED_FOR_ALL:
                member = _member(block, kind, size, extended)
                self._left, self._padding = member.size, -member.size % _BLOCK
                extended = {}
                yield member

    def contents(self) -> Iterator[bytes]:
        """Chunks of the contents of the member yielded last."""
        while self._left:
            yield self._read(min(self._left, _CHUNK))

    def _read(self, size: int) -> bytes:
        data = self._source.read(size)
        if not data:
            raise _damaged("it ends early")
        self._left -= len(data)
        return data

    def _text(self, size: int) -> bytes:
        if size > _LONGEST_HEADER:
            raise _damaged(f"a name of {size} bytes")
        return b"".join(self.contents())

    def _next_block(self) -> bytes | None:
        """The next header; None at the end of the archive."""
        for _ in self.contents():
            """skip the rest of the contents"""
        if self._padding and len(self._source.read(self._padding)) != self._padding:
            raise _damaged("it ends early")
        block = self._source.read(_BLOCK)
        if len(block) != _BLOCK:
            raise _damaged("it ends early")
        if block == _NOTHING:
            return None
        if _number(block[148:156]) != _sum(block[:148] + b" " * 8 + block[156:]):
            raise _damaged("a header does not add up")
        return block


def _member(block: bytes, kind: bytes, size: int, extended: dict[str, str]) -> TarMember:
    """The member of a header; `extended` holds fields from preceding extended headers."""
    name = _until_nul(block[:_SHORT_NAME])
    # POSIX stores the first part of a long path separately; GNU uses that field otherwise
    if block[257:263] == b"ustar\0" and (prefix := _until_nul(block[345:500])):
        name = prefix + b"/" + name
    path = extended.get("path", os.fsdecode(name))
    if kind in _FILES:
        # archives older than the directory type mark directories by a trailing slash
        kind = DIRECTORY if kind == _OLD_FILE and path.endswith("/") else FILE
    if "size" in extended:
        size = _decimal(extended["size"].encode(errors="replace"))
    target = extended.get("linkpath", os.fsdecode(_until_nul(block[157:257])))
    if "\0" in path + target:
        raise _damaged("a name holds a NUL byte")
    return TarMember(
        name=path,
        kind=kind,
        mode=_number(block[100:108]) & 0o777,
        # links and directories have no contents, whatever the header claims
        size=0 if kind in (DIRECTORY, SYMLINK, _HARD_LINK) else size,
        target=target,
    )


def _until_nul(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes) -> int:
    """A numeric field: octal digits, or binary after a mark byte."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = _until_nul(field).strip(b" ")
    if digits.strip(b"01234567"):
        raise _damaged(f"{digits!r} is no number")
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise _damaged(f"{digits[:40]!r} is no number")
    return int(digits)


def _records(data: bytes) -> Iterator[tuple[str, str]]:
    """Key-value pairs of an extended header: lines of LENGTH KEY=VALUE, where LENGTH counts the whole
    line."""
    while data:
        length = _decimal(data.split(b" ", 1)[0])
        record = data[:length]
        key, equals, value = record.partition(b" ")[2].removesuffix(b"\n").partition(b"=")
        if not equals or len(record) < length:
            raise _damaged("a record does not add up")
        yield os.fsdecode(key), os.fsdecode(value)
        data = data[length:]


def _damaged(why: str) -> OSError:
    return OSError(errno.EINVAL, f"the archive is damaged: {why}")


OURS, STATE = ".nano", "/opt/nano/state"
"""folder of a jail's API, and the place where its programs see it: outside the workspace, which an agent may
clean"""
LINKS = "/opt/nano/links"
"""file of a jail's root: JSON of (target, path) of symlinks in what each jail has for itself"""
T = TypeVar("T")
LEFT_OUT = frozenset({".git", "__pycache__", ".pytest_cache"})
SMALL_BYTES = 1 << 20
"""bytes; an archive up to this size is kept in memory and sent in one piece"""
_CHUNK = 1 << 20
_LONGEST_PATH = 4000
"""bytes; below Linux's 4096 by the length of the workspace's own path"""
DEEPEST = 64
"""levels of nested folders; the cost of opening a path grows with its depth"""


_NO_NAMES = ("", ".", "..")


def check_path(path: str) -> str:
    """The path without redundant parts. Raises PermissionError if it leads out of the workspace."""
    if "/" not in path and path not in _NO_NAMES and "\0" not in path:
        return path  # the usual case
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        raise PermissionError(errno.EACCES, "outside the workspace; use a path relative to it", path)
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, "a path cannot hold a NUL byte", path)
    return "/".join(part for part in parts if part not in ("", ".")) or "."


def _open(root: int, path: str, flags: int, mode: int = 0) -> int:
    try:
        return kernel.open_beneath(root, path, flags, mode)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise PermissionError(errno.EACCES, "a symlink leads out of the workspace", path) from error
        raise


def _regular(fd: int, path: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise PermissionError(errno.EACCES, "not a regular file", path)


def placed(path: str) -> tuple[bool, str]:
    """Whether a path of the API lies in `OURS`, and its part below that or below the workspace."""
    first, _, rest = check_path(path).partition("/")
    return (True, rest) if first == OURS and rest else (False, path)


def show_state(work: str, state: str = STATE) -> None:
    """Let programs find `OURS` in the workspace too, unless something else has that name."""
    # the agent may have made its workspace unwritable
    with contextlib.suppress(FileExistsError, PermissionError):
        os.symlink(state, os.path.join(work, OURS))


def lay_links() -> None:
    """Make the links that a program of the jail may have removed, with its rights."""
    if not os.path.exists(LINKS):
        return
    with open(LINKS) as file:
        wanted = json.load(file)
    for target, path in wanted:
        with contextlib.suppress(OSError):  # a program has put something else there
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)


def read(root: int, path: str, out: int) -> None:
    # non-blocking: opening a FIFO without a writer would block
    fd = _open(root, check_path(path), os.O_RDONLY | os.O_NONBLOCK)
    _regular(fd, path)
    _copy(fd, out)
    os.close(fd)


def write(root: int, path: str, data: int) -> None:
    name = check_path(path)
    if name == "." or path.endswith("/"):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    _make_parents(root, name)
    fd = _open(root, name, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
    _regular(fd, path)
    os.ftruncate(fd, 0)
    _copy(data, fd)
    os.close(fd)


def _copy(source: int, target: int) -> None:
    while chunk := os.read(source, _CHUNK):
        while chunk:
            chunk = chunk[os.write(target, chunk) :]


def _make_parents(root: int, name: str) -> None:
    parts = name.split("/")[:-1]
    for end in range(1, len(parts) + 1):
        try:
            os.close(_open(root, "/".join(parts[:end]), os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            parent = _open(root, "/".join(parts[: end - 1]) or ".", os.O_PATH | os.O_DIRECTORY)
            os.mkdir(parts[end - 1], dir_fd=parent)
            os.close(parent)


class _OwnedTree:
    """The entries below a folder, read by their owner whatever their permissions.

    Folders that are opened for that get their mode back at the end. `unread` has the paths that cannot be
    read; what vanishes meanwhile is in neither.
    """

    def __init__(self, top: str, left_out: frozenset[str], *, ours: bool) -> None:
        """`ours`: False for a folder of the user's, whose permissions stay as they are."""
        self._top, self._left_out, self._ours = top, left_out, ours
        self.unread: list[str] = []
        self._modes: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        self._root = os.open(self._top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        for name, mode in reversed(self._modes):
            with contextlib.suppress(OSError):
                self._chmod(name, mode)
        os.close(self._root)

    def walk(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Every entry with its relative path, parents first, by name; symlinks are not followed.

        Raises OSError (ENAMETOOLONG) if one is nested too deeply.
        """
        pending = self._opened(".", lambda: self._listed(""))
        while pending:
            name, entry = found = pending.pop()
            yield found
            if entry.is_dir(follow_symlinks=False):
                with self._noting(name):
                    pending += self._opened(name, lambda: self._listed(name))  # noqa: B023 (called at once)

    def open(self, name: str) -> int | None:
        """A descriptor to read a file; None where it cannot be, or has vanished."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._noting(name):
            return self._opened(name, lambda: os.open(f"{self._top}/{name}", flags))
        return None

    def _listed(self, name: str) -> list[tuple[str, os.DirEntry[str]]]:
        path = f"{self._top}/{name}"
        os.stat(f"{path}/.")  # a folder may be listed that cannot be entered
        return [*_entries(path, f"{name}/" if name else "", self._left_out)]

    def _opened(self, name: str, opening: Callable[[], T]) -> T:
        try:
            return opening()
        except PermissionError:
            if not self._ours:
                raise
            self._modes.append((name, self._chmod(name, None)))
            return opening()

    def _chmod(self, name: str, mode: int | None) -> int:
        """Set a mode, None for one that the owner can read. Returns the one before."""
        fd = kernel.open_beneath(self._root, name, os.O_PATH | os.O_NOFOLLOW)
        try:
            before = os.fstat(fd).st_mode
            # fchmod takes no such descriptor
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(before) | 0o700 if mode is None else mode)
            return stat.S_IMODE(before)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                self.unread.append(name)


def _entries(path: str, before: str, left_out: frozenset[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Entries of a folder, in reverse order of name."""
    if before.count("/") > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"more than {DEEPEST} folders lie below each other", before)
    with os.scandir(path) as listed:
        children = sorted(((each.name, each) for each in listed if each.name not in left_out), reverse=True)
    for child, entry in children:
        name = before + child
        # encoding is expensive: bytes are counted only for long names
        if 4 * len(name) >= _LONGEST_PATH and len(os.fsencode(name)) >= _LONGEST_PATH:
            raise OSError(errno.ENAMETOOLONG, f"a path is longer than {_LONGEST_PATH} bytes", name)
        yield name, entry


def survey(top: str, largest: int, most: int | None = None) -> None:
    """Raises OSError (EFBIG), before anything is read, if the tree is larger than may be packed.

    `largest`: bytes by the files' stated sizes, holes included. `most`: number of files, folders and links.
    """
    size = 0
    with _OwnedTree(top, LEFT_OUT, ours=True) as tree:
        for count, (_, entry) in enumerate(tree.walk(), 1):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    size += entry.stat(follow_symlinks=False).st_size
            if most is not None and count > most:
                raise OSError(errno.EFBIG, f"it holds more than {most} files and folders")
            if size > largest:
                raise OSError(errno.EFBIG, f"its files hold more than {largest >> 20} MB, holes included")


def pack(
    top: str, out: IO[bytes], left_out: frozenset[str] = LEFT_OUT, *, ours: bool = True
) -> tuple[int, list[str]]:
    """Write files, directories and symlinks below `top` as a tar stream.

    Returns the number of entries, and the paths that cannot be read: they are members of the kind UNREAD, a
    folder besides its own. Other kinds become members of the kind PIPE. `ours`: the permissions below `top`
    may be changed for the moment of reading. Raises OSError if an entry is nested too deeply, or `top`
    itself cannot be read.

    The stream depends on names, contents, link targets and permissions only. Hard links become files.
    """
    count = 0
    with _OwnedTree(top, left_out, ours=ours) as tree:
        for name, entry in tree.walk():
            count += 1
            with contextlib.suppress(FileNotFoundError):
                if entry.is_symlink():
                    target = os.readlink(f"{top}/{name}")
                    write_member(out, TarMember(name, SYMLINK, 0o777, target=target))
                elif entry.is_dir():
                    permissions = entry.stat(follow_symlinks=False).st_mode & 0o777
                    write_member(out, TarMember(name, DIRECTORY, permissions))
                elif entry.is_file():
                    _pack_file(out, name, entry, tree)
                else:
                    write_member(out, TarMember(name, PIPE, 0))
        unread = sorted(tree.unread)
    for name in unread:
        write_member(out, TarMember(name, UNREAD, 0))
    write_end(out)
    return count, unread


def pack_small(top: str) -> bytes | None:
    """The stream of `pack`, in memory; None if it is longer than SMALL_BYTES."""
    out = _Short()
    try:
        pack(top, cast(IO[bytes], out))
    except _TooLong:
        return None
    return b"".join(out.parts)


class _TooLong(Exception):
    """The archive is longer than SMALL_BYTES."""


class _Short:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._room = SMALL_BYTES

    def write(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise _TooLong
        self.parts.append(data)


def _pack_file(out: IO[bytes], name: str, entry: os.DirEntry[str], tree: _OwnedTree) -> None:
    permissions = entry.stat(follow_symlinks=False).st_mode & 0o777
    if (fd := tree.open(name)) is None:
        return
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        # its first part before its size, so that a small file that becomes shorter meanwhile is whole
        chunk = os.read(fd, min(status.st_size, _CHUNK))
        left = size = status.st_size if status.st_size > _CHUNK else len(chunk)
        write_member(out, TarMember(name, FILE, permissions, size))
        while left:
            if not chunk:
                raise OSError(errno.EIO, "it became shorter while it was read", name)
            out.write(chunk)
            left -= len(chunk)
            chunk = os.read(fd, min(left, _CHUNK))
        write_padding(out, size)
    finally:
        os.close(fd)


def unpack(root: int, source: IO[bytes]) -> None:
    """Unpack a stream of `pack` into an empty folder; nothing is created outside `root`."""
    modes: list[tuple[str, int]] = []
    reader = TarReader(source)
    with _Parents(root) as parents:
        for member in reader:
            name = check_path(member.name)
            if member.kind == DIRECTORY:
                parents.of(f"{name}/.")
                modes.append((name, member.mode))
            elif member.kind == SYMLINK:
                parent, base = parents.of(name)
                os.symlink(member.target, base, dir_fd=parent)
                os.utime(base, (EPOCH, EPOCH), dir_fd=parent, follow_symlinks=False)
            elif member.kind == FILE:
                parent, base = parents.of(name)
                _unpack_file(parent, base, member, reader)
    # directory permissions come last, children first: a read-only directory takes no more files
    for name, mode in reversed(modes):
        fd = _open(root, name, os.O_RDONLY | os.O_DIRECTORY)
        os.utime(fd, (EPOCH, EPOCH))
        os.fchmod(fd, mode)
        os.close(fd)


class _Parents:
    """Opens the parent folders of entries beneath the root; consecutive entries share an open folder."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._name = ""
        self._fd = os.dup(root)

    def of(self, name: str) -> tuple[int, str]:
        """Descriptor of the parent folder, and the entry's name in it. Raises OSError if a link leads out."""
        folder, _, base = name.rpartition("/")
        if folder != self._name:
            _make_parents(self._root, name)
            fd = _open(self._root, folder or ".", os.O_PATH | os.O_DIRECTORY)
            os.close(self._fd)
            self._name, self._fd = folder, fd
        return self._fd, base

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _unpack_file(parent: int, base: str, member: TarMember, reader: TarReader) -> None:
    # O_EXCL never follows a symlink
    fd = os.open(base, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        for chunk in reader.contents():
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
        os.fchmod(fd, member.mode)
        os.utime(fd, (EPOCH, EPOCH))
    finally:
        os.close(fd)


def clear(top: str) -> None:
    """Remove everything below `top`, whatever its permissions and however deep."""
    os.chmod(top, 0o700)
    pending = sorted(os.listdir(top))
    unused = (f"removed-{number}" for number in itertools.count())
    while pending:
        path = os.path.join(top, pending.pop())
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for child in os.listdir(path):
            inner = os.path.join(path, child)
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                # moved up to the top, so that no path becomes too long
                os.chmod(inner, 0o700)
                up = next(name for name in unused if not os.path.lexists(os.path.join(top, name)))
                os.rename(inner, os.path.join(top, up))
                pending.append(up)
            else:
                os.unlink(inner)
        os.rmdir(path)
