"""Runs in a jail beside a long-lived program: carries its standard streams and its workspace over a socket.

Needs nothing but the standard library, since any interpreter of a jail may run it, from its source alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading

MESSAGE, WORKSPACE, ENDED = b"m", b"w", b"e"
"""kinds of frames: bytes of the program's streams; the workspace, asked for by an empty frame; the program's
exit code"""
LONGEST_FRAME = 1 << 30
_HEADER = struct.Struct(">cI")
_CHUNK = 1 << 16
_LEFT_OUT = (".git", "__pycache__", ".pytest_cache")
"""names that snapshots of a workspace leave out"""


class Channel:
    """Frames over a socket, used on both sides."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: bytes, data: bytes) -> None:
        with self._lock:
            self._connection.sendall(_HEADER.pack(kind, len(data)) + data)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next frame; None at the end, and for what no frame is."""
        header = self._exactly(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        kind, size = _HEADER.unpack(header)
        if kind not in (MESSAGE, WORKSPACE, ENDED) or size > LONGEST_FRAME:
            return None
        data = self._exactly(size)
        return (kind, data) if len(data) == size else None

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        with contextlib.suppress(OSError):
            while len(data) < size and (chunk := self._connection.recv(min(size - len(data), 1 << 20))):
                data += chunk
        return bytes(data)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class Folder:
    """The workspace; `pack` returns nothing where it is as it was packed or unpacked last."""

    def __init__(self, root: str) -> None:
        self._root = root
        # here and not at import: this side alone is in a jail
        tarfile.TarFile.extraction_filter = staticmethod(lambda member, _path: member)
        self._known = self._fingerprint(self._entries())

    def unpack(self, data: bytes) -> None:
        """Make the folder hold exactly the archive. What is the same stays untouched."""
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            members = {os.path.normpath(member.name): member for member in archive}
            for name in sorted(self._entries(), reverse=True):
                if name not in members:
                    self._remove(name)
            for name, member in sorted(members.items()):
                if name != "." and not self._holds(name, member, archive):
                    self._remove(name, unless_folder=member.isdir())
                    archive.extract(member, self._root, set_attrs=True, numeric_owner=True)
        self._known = self._fingerprint(self._entries())

    def pack(self) -> bytes:
        entries = self._entries()
        fingerprint = self._fingerprint(entries)
        if fingerprint == self._known:
            return b""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for name in sorted(entries):
                archive.add(os.path.join(self._root, name), name, recursive=False)
        self._known = fingerprint
        return out.getvalue()

    def _entries(self) -> list[str]:
        """Relative names of the files, links and folders."""
        found = []
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            base = os.path.relpath(folder, self._root)
            names = [*folders, *(name for name in files if name not in _LEFT_OUT)]
            found += [os.path.normpath(os.path.join(base, name)) for name in names]
        return [name for name in found if self._kept(name)]

    def _kept(self, name: str) -> bool:
        path = os.path.join(self._root, name)
        return os.path.islink(path) or os.path.isfile(path) or os.path.isdir(path)

    def _fingerprint(self, entries: list[str]) -> str:
        digest = hashlib.sha256()
        for name in sorted(entries):
            path = os.path.join(self._root, name)
            status = os.lstat(path)
            digest.update(
                f"{name}\0{status.st_mode:o}\0{status.st_size}\0".encode("utf-8", "surrogateescape")
            )
            if os.path.islink(path):
                digest.update(os.fsencode(os.readlink(path)))
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    digest.update(file.read())
        return digest.hexdigest()

    def _holds(self, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> bool:
        path = os.path.join(self._root, name)
        if os.path.islink(path) or not os.path.exists(path) or member.issym():
            return False
        if member.isdir():
            return os.path.isdir(path) and os.stat(path).st_mode & 0o777 == member.mode & 0o777
        status = os.stat(path)
        if (status.st_size, status.st_mode & 0o777) != (member.size, member.mode & 0o777):
            return False
        content = archive.extractfile(member)
        with open(path, "rb") as file:
            return content is not None and file.read() == content.read()

    def _remove(self, name: str, *, unless_folder: bool = False) -> None:
        path = os.path.join(self._root, name)
        if os.path.isdir(path) and not os.path.islink(path):
            if not unless_folder:
                shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


def main() -> None:
    """Serve the socket on standard input until the other side closes it."""
    channel = Channel(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the program must not get the socket
    start = json.loads(sys.argv[1])
    folder = Folder(os.getcwd())
    if start["workspace"]:
        received = channel.receive()
        if received is None:
            return
        folder.unpack(received[1])
    try:
        program = subprocess.Popen(
            start["argv"], cwd=start["cwd"], env=start["env"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError as problem:
        channel.send(ENDED, f"it cannot be started: {problem.strerror}: {problem.filename}".encode())
        return
    threading.Thread(target=_carry, args=(program, channel), daemon=True).start()
    try:
        _serve(program, channel, folder)
    finally:
        program.kill()


def _carry(program: subprocess.Popen[bytes], channel: Channel) -> None:
    """Send what the program writes, and at the end its exit code."""
    assert program.stdout is not None
    while chunk := os.read(program.stdout.fileno(), _CHUNK):
        channel.send(MESSAGE, chunk)
    code = program.wait()
    ended = f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
    channel.send(ENDED, ended.encode())


def _serve(program: subprocess.Popen[bytes], channel: Channel, folder: Folder) -> None:
    assert program.stdin is not None
    while (received := channel.receive()) is not None:
        kind, data = received
        try:
            if kind == MESSAGE:
                program.stdin.write(data)
                program.stdin.flush()
            elif data:
                folder.unpack(data)
            else:
                channel.send(WORKSPACE, folder.pack())
        except BrokenPipeError:
            pass  # it has ended, which the other thread reports
        except (OSError, tarfile.TarError, ValueError) as problem:
            channel.send(ENDED, f"its workspace cannot be carried over: {problem}".encode())
            return
