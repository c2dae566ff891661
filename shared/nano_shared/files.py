"""Content hashes and ids; files and folders that appear complete or not at all; temporary folders."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import platformdirs

from nano_shared.errors import LogError, NanoError, UsageError


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """`sha256:<hex>` of bytes as they are, of text as UTF-8, of anything else as canonical JSON."""
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
    else:
        data = canonical_json(value).encode("utf-8", "surrogatepass")
    return "sha256:" + hashlib.sha256(data).hexdigest()


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32, which sorts as the numbers do
_LENGTH = 16
_RANDOM_BITS = 32


def new_run_id() -> str:
    """A new run id that sorts by time: 48 bits of milliseconds, then 32 random bits."""
    number = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


# EFBIG: a file size limit (ulimit -f) was reached
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_OS_ERROR = re.compile(r"\(os error (\d+)\)")

WAY_OUT = "free some space, or keep nano's data elsewhere by setting NANO_HOME"


@contextmanager
def full_disk_explained(path: Path, error_type: type[NanoError] = LogError) -> Iterator[None]:
    """Turns a full disk, an exhausted quota or a file size limit into `error_type`."""
    try:
        yield
    except _failures() as error:
        number = _number(error)
        if number not in _NO_SPACE:
            raise
        raise error_type(f"no space left while writing {path} ({os.strerror(number)}): {WAY_OUT}") from error


def _failures() -> tuple[type[Exception], ...]:
    """Exceptions that a write may raise; safetensors has one of its own."""
    safetensors = sys.modules.get("safetensors")
    return (OSError, safetensors.SafetensorError) if safetensors else (OSError,)


def _number(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    found = _OS_ERROR.search(str(error))
    return int(found.group(1)) if found else 0


@contextmanager
def durable_folder(target: Path, error_type: type[NanoError]) -> Iterator[Path]:
    """Yields an empty folder beside `target` that is renamed to `target` if the block ends without an error.

    Its files are on disk before the rename, and the rename is when this returns. They have the mode that the
    umask gives, also those of safetensors, which writes for their owner alone. `sweep` removes what a killed
    process leaves. The caller ensures that `target` does not exist and that nobody else writes it.
    Raises `error_type` if the disk is full.
    """
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    with full_disk_explained(target, error_type):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            _sync_tree(temporary, mode=temporary.stat().st_mode & 0o666)
            os.rename(temporary, target)
            sync(target.parent)
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of `name` left in `folder`."""
    for remains in folder.glob(f".{name}.tmp-*"):
        shutil.rmtree(remains)


def write_text(path: Path, text: str, error_type: type[NanoError] = LogError) -> None:
    """Write or replace a file of UTF-8 atomically.

    Raises `error_type` if the disk is full, or if the text has lone surrogates, as an argument has whose
    bytes are not UTF-8.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        part = ascii(text[max(0, error.start - 20) : error.end])
        raise error_type(f"{path}: {part} is not Unicode, and the file holds text") from None
    with full_disk_explained(path, error_type), replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file name beside `path`; synced and renamed to `path` if the block raises nothing."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path | None) -> Iterator[TextIO]:
    """A file that appears if the block ends without an error; None is standard output.

    Raises UsageError if the name is taken or its folder cannot be written.
    """
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with new_binary(path) as temporary:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()


@contextmanager
def new_binary(path: Path) -> Iterator[Path]:
    """As `replacing`, for a name that must be free."""
    _refuse_unwritable(path)
    with full_disk_explained(path, UsageError):
        with replacing(path) as temporary:
            yield temporary
        sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder; renamed to `path` if the block ends without an error."""
    _refuse_unwritable(path)
    with durable_folder(path, UsageError) as folder:
        yield folder


def _refuse_unwritable(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already; name another with -o")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another with -o")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: {path.parent} is not writable for this user; name another with -o")


def user_path(text: str | Path) -> Path:
    """The path that a user wrote, with `~` expanded; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(text))


def real_path(text: str | Path) -> Path:
    """As `user_path`, absolute and without links; links in a circle stay."""
    return Path(os.path.realpath(user_path(text)))


def file_hash(path: Path) -> str:
    """`sha256:` of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path, *, mode: int) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink():
                file.chmod(file.stat().st_mode & 0o111 | mode)
            sync(file)
        sync(Path(folder))


class NotReadable(ValueError):
    """The file exists, but must not be read; the message says why."""


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file, following links. For paths that a stranger may control.

    Raises FileNotFoundError and other OSErrors, and NotReadable for pipes, devices and the like, and for more
    than `most` bytes.
    """
    # non-blocking: opening a pipe without a writer would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:  # `open` refuses the descriptor of a folder, and leaves it open
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotReadable(f"it is a {_kind(mode)}, not a file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise NotReadable(f"it has more than {most} bytes")
    return content


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def nano_home() -> Path:
    """The data folder, absolute. It is created by whoever writes into it."""
    chosen = os.environ.get("NANO_HOME")
    return user_path(chosen).absolute() if chosen else platformdirs.user_data_path("nano")


def checkpoints_dir() -> Path:
    return nano_home() / "checkpoints"


PREFIX = "nano-scratch-"
_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30
"""free bytes that /dev/shm must have to be used: four of the largest workspaces, or the log of 20,000
checks"""

_swept: set[tuple[int, str]] = set()
_lock = threading.Lock()


class ScratchFolder:
    """A temporary folder under `parent`; by default under the directory for temporary files."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """`kind` becomes part of its name. Raises OSError if no folder can be created."""
        parent = parent or tempfile.gettempdir()
        _sweep_once(parent)
        self._owner = os.getpid()
        self.path, self._held = _new_folder(kind, parent)

    def remove(self) -> None:
        """Remove the folder and its contents; does nothing in a fork of its owner. Idempotent."""
        if self._held < 0 or os.getpid() != self._owner:
            return
        _remove(self.path)
        os.close(self._held)
        self._held = -1


@contextmanager
def scratch_folder(kind: str, parent: str | None = None) -> Iterator[Path]:
    """A temporary folder, removed after the block."""
    folder = ScratchFolder(kind, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def in_memory() -> str | None:
    """A parent for folders in memory, if there is one with room; else None."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
            return str(_MEMORY)
    return None


def is_scratch(folder: Path) -> bool:
    """Whether a folder is, or lies in, a temporary folder of ours."""
    return any(part.startswith(PREFIX) for part in folder.parts)


def sweep_scratch(parent: str) -> None:
    """Remove the folders under `parent` whose owners have ended."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX):
            continue
        with suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # folders of other users are not ours to remove
                if os.geteuid() in (0, os.fstat(descriptor).st_uid):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(Path(entry.path))
            finally:
                os.close(descriptor)


def _sweep_once(parent: str) -> None:
    with _lock:
        if (os.getpid(), parent) in _swept:
            return
        _swept.add((os.getpid(), parent))
    with suppress(OSError):
        sweep_scratch(parent)


def _new_folder(kind: str, parent: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        # a concurrent sweep may remove it before it is locked: then create another
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return path, descriptor
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path, onerror=_open_up)
    except RecursionError:  # a program nested its folders deeper than Python's recursion limit
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", os.fspath(path)], check=False, capture_output=True)


def _open_up(function: Callable[..., object], path: str, problem: object) -> None:
    """Retry after restoring rights that a program took from its own folders."""
    with suppress(OSError):
        closed = [place for place in (os.path.dirname(path), path) if _closed(place)]
        for place in closed:
            os.chmod(place, 0o700)
        if closed and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, onerror=_open_up)
        elif closed:
            os.unlink(path)


def _closed(place: str) -> bool:
    mode = os.lstat(place).st_mode
    return stat.S_ISDIR(mode) and mode & 0o700 != 0o700
