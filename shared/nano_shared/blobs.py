"""Content-addressed files: bytes are stored under their `sha256:` id, and verified when they are read.

They lie in a folder, in memory, or in an object store (S3, Google Cloud Storage, Azure).
"""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from nano_shared.durable import full_disk_explained
from nano_shared.errors import ConfigError, LogError
from nano_shared.hashing import content_hash
from nano_shared.printable import one_line
from nano_shared.scratch import nano_home

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_ID = re.compile(r"sha256:[0-9a-f]{64}")
# workspaces are snapshotted after each turn: speed matters more than the last tenth of the size
_COMPRESSION = 1


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
        """Store bytes durably, and return their id.

        Raises LogError when the disk is full or the folder cannot be written.
        """
        blob = content_hash(data)
        target = self.path(blob)
        if not target.exists():
            with full_disk_explained(self.root):
                try:
                    _write(target, pack(data))
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


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class MemoryBlobs(BlobStore):
    """A BlobStore that keeps every blob in memory."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))
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


SCHEMES = ("s3", "gs", "az")
_RETRY_SECONDS = 30
"""as long as a write waits for a database that restarts"""


class ObjectBlobs(BlobStore):
    """Objects of a bucket by the hash of their content; those that were used are also in NANO_HOME/blobs.

    Credentials, region and endpoint are those of the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
    Safe for any number of writers on any number of machines: an object appears whole, and two writers of one
    blob write the same bytes. Requests that fail are repeated for half a minute.
    """

    def __init__(self, address: str) -> None:
        """`address`: s3://BUCKET/PREFIX. Raises ConfigError without obstore, LogError for no such address."""
        super().__init__(nano_home() / "blobs")
        self.address = address.rstrip("/")
        self._there: set[str] = set()
        """blobs that the bucket is known to hold; none is ever removed"""
        self._store = _opened(self.address)

    def ids(self) -> Iterator[str]:
        with self._explained():
            for page in self._store.list():
                for found in page:
                    if (blob := "sha256:" + found["path"].replace("/", "")) and self.is_id(blob):
                        yield blob

    def put(self, data: bytes) -> str:
        """Store bytes in the bucket, and return their id. Raises LogError."""
        blob = content_hash(data)
        if blob not in self:
            with self._explained():
                self._store.put(self._key(blob), pack(data))
            self._there.add(blob)
        return super().put(data)

    def get(self, blob: str) -> bytes:
        """The bytes of a blob, with their hash verified. Raises LogError if it is missing or corrupt."""
        if super().__contains__(blob):
            try:
                return super().get(blob)
            except LogError:  # the copy is damaged
                self.path(blob).unlink(missing_ok=True)
        where = f"{self.address}/{self._key(blob)}"
        with self._explained():
            try:
                packed = bytes(self._store.get(self._key(blob)).bytes())
            except FileNotFoundError:
                raise LogError(f"blob {blob} is missing: there is no {where}") from None
        data = unpack(blob, packed, where)
        self._there.add(blob)
        super().put(data)
        return data

    def __contains__(self, blob: str) -> bool:
        if blob not in self._there:
            with self._explained():
                try:
                    self._store.head(self._key(blob))
                except FileNotFoundError:
                    return False
            self._there.add(blob)
        return True

    def _key(self, blob: str) -> str:
        return self.path(blob).relative_to(self.root).as_posix()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
            raise LogError(
                f"blobs {self.address}: the store refuses these credentials ({_cause(error)}); set"
                " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a bucket that they may read and write"
            ) from None
        except (BaseError, OSError) as error:
            raise LogError(
                f"blobs {self.address}: {_cause(error)}; is there such a bucket, and does AWS_ENDPOINT_URL"
                " name its server?"
            ) from None


def open_blobs(address: str | Path) -> BlobStore:
    """The blobs of a folder, or of an object store: s3://BUCKET/PREFIX, gs://..., az://....

    Raises LogError for another address, ConfigError where the library for object stores is not installed.
    """
    scheme, found, _ = str(address).partition("://")
    if not found:
        return BlobStore(Path(address).expanduser().absolute())
    if scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)
        raise LogError(f"blobs {address}: name a folder, or an object store by {known}")
    return ObjectBlobs(str(address))


def _opened(address: str) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"blobs {address}: an object store needs obstore ({error}); pip install 'nano-rl-coder[s3]'"
        ) from error
    timeout = timedelta(seconds=_RETRY_SECONDS)
    # a server of one's own has no certificate at times; its address says so
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    try:
        return from_url(
            address,
            client_options={"connect_timeout": "10 seconds", "timeout": "60 seconds", "allow_http": plain},
            retry_config={"max_retries": 1000, "retry_timeout": timeout},
        )
    except (BaseError, ValueError, OSError) as error:
        raise LogError(
            f"blobs {address}: {_cause(error)}; an address is s3://BUCKET/PREFIX, gs://... or az://..."
        ) from None


def _cause(error: BaseException) -> str:
    """What the server answered, without the request that the library puts before it."""
    text = str(error).partition("Debug source:")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"the server answers {code[1]}" if code else one_line(text.rpartition(" - ")[2], 200)
