"""Blobs in an object store: a real server of the S3 protocol, seen from several machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from log_values import a_run

from nano_cluster import object_blobs as module
from nano_cluster.log_copy import Copied, copy_into
from nano_shared.errors import ConfigError, LogError
from nano_shared.files import content_hash
from nano_shared.snapshot import open_blobs
from nano_shared.store import LogStore


def elsewhere(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """What follows happens on a machine of its own."""
    monkeypatch.setenv("NANO_HOME", str(home))


def overwrite(bucket: str, blob: str, data: bytes) -> None:
    module._opened(bucket).put(f"{blob[7:9]}/{blob[9:11]}/{blob[11:]}", data)


def test_what_one_machine_writes_another_reads(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = f"sqlite:///{tmp_path}/log.db?blobs={bucket}"
    with LogStore.open(log) as store:
        blob = store.put_blob(b"a workspace")
        store.begin(a_run())
        assert store.address.startswith("sqlite:")
        again = store.address
    elsewhere(monkeypatch, tmp_path / "other")
    with LogStore.open(again) as store:
        assert store.blobs.address == bucket
        assert store.get_blob(blob) == b"a workspace"
    assert not (tmp_path / "blobs").exists()


def test_a_log_moves_into_a_bucket_and_out_again(bucket: str, tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "a" / "log.db") as here:
        here.begin(a_run())
        blob = here.put_blob(b"an output")
        with LogStore.open(f"sqlite:///{tmp_path}/b.db?blobs={bucket}") as there:
            done = Copied()
            copy_into(there, here, done)
            copy_into(there, here, done)
            assert (done.blobs, done.known_blobs) == (1, 1)
            with LogStore.open(tmp_path / "c" / "log.db") as back:
                copy_into(back, there, Copied())
                assert back.get_blob(blob) == b"an output"


def test_a_damaged_copy_is_fetched_again(bucket: str) -> None:
    blobs = open_blobs(bucket)
    blob = blobs.put(b"content")
    blobs.path(blob).write_bytes(b"rubbish")
    assert blobs.get(blob) == b"content"
    assert open_blobs(blobs.root).get(blob) == b"content"


@pytest.mark.parametrize("damage", [b"", b"not zlib", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_a_damaged_object_is_corrupt(
    bucket: str, damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = open_blobs(bucket).put(b"content")
    overwrite(bucket, blob, damage)
    elsewhere(monkeypatch, tmp_path / "other")
    with pytest.raises(LogError, match=f"{blob} is corrupt: .*{bucket}"):
        open_blobs(bucket).get(blob)


def test_what_is_no_blob_is_not_listed(bucket: str) -> None:
    blob = open_blobs(bucket).put(b"content")
    module._opened(bucket).put("README.md", b"ours")
    assert list(open_blobs(bucket).ids()) == [blob]


def test_a_bucket_that_is_not_there(object_store: str) -> None:
    with pytest.raises(LogError, match=r"blobs s3://nowhere/x: the server answers NoSuchBucket; is there"):
        open_blobs("s3://nowhere/x").put(b"content")


def test_a_server_that_is_away(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    blobs = open_blobs(bucket)
    for use in (lambda: blobs.put(b"x"), lambda: blobs.get(content_hash(b"x")), lambda: list(blobs.ids())):
        with pytest.raises(LogError, match=f"blobs {bucket}: .*does AWS_ENDPOINT_URL name its server"):
            use()


def test_addresses_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LogError, match="ftp://x/y: name a folder, or an object store by s3://BUCKET/PREFIX"):
        LogStore.open(f"sqlite:///{tmp_path}/log.db?blobs=ftp://x/y")
    with pytest.raises(LogError, match="an address is s3://BUCKET/PREFIX"):
        open_blobs("s3://")
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install 'nano-rl-coder\[s3\]'"):
        open_blobs("s3://bucket/x")
