"""Blobs in an object store: S3, Google Cloud Storage, Azure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from nano_shared.errors import ConfigError, LogError
from nano_shared.files import content_hash, nano_home
from nano_shared.printable import one_line
from nano_shared.snapshot import BlobStore, pack, unpack

if TYPE_CHECKING:
    from obstore.store import ObjectStore

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

    def remove(self, blob: str) -> int | None:
        """A bucket keeps its objects: other processes know that they are there."""
        return None

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
