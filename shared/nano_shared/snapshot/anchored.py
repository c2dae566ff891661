"""A directory held by descriptor: no symlink, present or swapped in meanwhile, leads out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_shared.hashing import content_hash
from nano_shared.snapshot.tree import MODE_BITS, Entry, Kind

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Entering a directory needs no permission to list it.
_PASSING = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """An OSError names `path`, where the call that failed knows a part of it or a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


class AnchoredDirectory:
    """Paths are relative with slashes, as in Entry. Methods raise OSError as the calls they wrap do."""

    def __init__(self, directory: Path) -> None:
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> AnchoredDirectory:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._root)

    def entry(self, path: str) -> Entry | None:
        """What stands at a path now, its content hashed; None where nothing does.

        Raises PermissionError for an unreadable file, ValueError for a pipe, a socket or a device.
        """
        try:
            with self._parent(path) as (parent, name):
                return _entry_at(parent, name, path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def children(self, path: str) -> list[str]:
        with self._parent(path) as (parent, name), _opened(parent, name, os.O_RDONLY | _FOLDER) as folder:
            return [f"{path}/{child}" for child in os.listdir(folder)]

    def check_parent_writable(self, path: str) -> None:
        """Raises PermissionError where this user may not change what the parent of a path holds."""
        with suppress(FileNotFoundError, NotADirectoryError), self._parent(path) as (parent, _):
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=parent):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def make_directory(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.mkdir(name, 0o700, dir_fd=parent)

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Create a file, on disk when this returns."""
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
        """Replace what stands at `target`, in one step."""
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
            # Snapshots know no setgid and no sticky bit: those that the user's directory has are kept.
            mode |= os.fstat(folder).st_mode & ~MODE_BITS & 0o7777
            # Through /proc, since a descriptor that needs no read permission refuses fchmod.
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
        return Entry(path, Kind.SYMLINK, 0, os.readlink(name, dir_fd=parent))
    if stat.S_ISDIR(mode):
        return Entry(path, Kind.DIRECTORY, mode & MODE_BITS, None)
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path!r} is a pipe, a socket or a device")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=parent), "rb") as file:
        return Entry(path, Kind.FILE, mode & MODE_BITS, content_hash(file.read()))
