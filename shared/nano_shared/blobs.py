"""Content-addressed files: bytes are stored under their `sha256:` id, and verified when they are read.

They lie in a folder, in memory, or in a store that `nano.blob_stores` registers by the scheme of its address.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from nano_shared.errors import LogError
from nano_shared.extensions import Extensions, refuse_missing
from nano_shared.files import content_hash, full_disk_explained, replacing, user_path

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
