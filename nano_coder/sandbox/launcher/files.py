"""File operations on a workspace, run by trusted code inside the jail; no path leaves the workspace."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO

from . import kernel

LEFT_OUT = frozenset({"__pycache__", ".pytest_cache"})
EPOCH = 1_577_836_800
"""modification time of every file that goes in or out: 2020-01-01, so that equal trees are equal streams"""

_CHUNK = 1 << 20
_LONGEST_PATH = 4000
"""bytes, below the system's 4096 by the room that the workspace's own path takes"""


def check_path(path: str) -> str:
    """The path without needless parts. Raises PermissionError where its text leads out of the workspace."""
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


def read(root: int, path: str, out: int) -> None:
    # non-blocking: a FIFO without a writer would wait for ever
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


def _walk(top: str, left_out: frozenset[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Every entry below `top` with its relative path, parents first, in order of name; follows no symlink.

    Entries that are nested so deep that no program can name them from `top` are passed over.
    """
    pending = [""]
    while pending:
        name = pending.pop()
        status = os.lstat(os.path.join(top, name))
        if name:
            yield name, status
        if stat.S_ISDIR(status.st_mode):
            children = sorted(set(os.listdir(os.path.join(top, name))) - left_out, reverse=True)
            paths = (os.path.join(name, child) for child in children)
            pending.extend(path for path in paths if len(os.fsencode(path)) < _LONGEST_PATH)


def pack(top: str, out: IO[bytes], left_out: frozenset[str] = LEFT_OUT) -> int:
    """Write files, directories and symlinks below `top` as a tar stream; other kinds are skipped.

    Returns how many entries there are.

    The stream depends on names, contents, link targets and permissions only. Hard links become files.
    """
    count = 0
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for name, status in _walk(top, left_out):
            count += 1
            member = tarfile.TarInfo(name)
            member.mtime = EPOCH
            member.mode = stat.S_IMODE(status.st_mode) & 0o777
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            elif stat.S_ISLNK(status.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(os.path.join(top, name))
                archive.addfile(member)
            elif stat.S_ISREG(status.st_mode):
                _pack_file(archive, member, os.path.join(top, name))
    return count


def _pack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            member.size = status.st_size
            archive.addfile(member, file)


def unpack(root: int, source: IO[bytes]) -> None:
    """Create what a stream of `pack` holds; nothing is created outside `root`."""
    modes: list[tuple[str, int]] = []
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            name = check_path(member.name)
            _make_parents(root, name)
            if member.isdir():
                _make_parents(root, name + "/.")
                modes.append((name, member.mode))
            elif member.issym():
                parent = _open(root, os.path.dirname(name) or ".", os.O_PATH | os.O_DIRECTORY)
                os.symlink(member.linkname, os.path.basename(name), dir_fd=parent)
                os.utime(os.path.basename(name), (EPOCH, EPOCH), dir_fd=parent, follow_symlinks=False)
                os.close(parent)
            elif member.isreg():
                _unpack_file(root, name, member, archive)
    # children first, and last of all: a directory without write permission takes no more files
    for name, mode in reversed(modes):
        fd = _open(root, name, os.O_RDONLY | os.O_DIRECTORY)
        os.utime(fd, (EPOCH, EPOCH))
        os.fchmod(fd, mode & 0o777)
        os.close(fd)


def _unpack_file(root: int, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    fd = _open(root, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    # as extractfile reads it, without an object for each file
    source = archive.fileobj
    assert source is not None
    source.seek(member.offset_data)
    left = member.size
    while left and (chunk := source.read(min(left, _CHUNK))):
        left -= len(chunk)
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
    if left:
        raise OSError(errno.EIO, "the stream ends early", name)
    os.fchmod(fd, member.mode & 0o777)
    os.utime(fd, (EPOCH, EPOCH))
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
                # up to the top, so that no path is ever longer than the system takes
                os.chmod(inner, 0o700)
                up = next(name for name in unused if not os.path.lexists(os.path.join(top, name)))
                try:
                    os.rename(inner, os.path.join(top, up))
                    pending.append(up)
                except OSError as error:
                    # the lower half of an overlay does not move; it came in by paths that were short enough
                    if error.errno != errno.EXDEV:
                        raise
                    clear(inner)
                    os.rmdir(inner)
            else:
                os.unlink(inner)
        os.rmdir(path)
