"""Blobs: the same bytes back or an error, never something else."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_shared.errors import LogError
from nano_shared.files import content_hash
from nano_shared.snapshot import BlobStore, open_blobs


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture(params=["folder", "bucket"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    address = tmp_path / "blobs" if request.param == "folder" else request.getfixturevalue("bucket")
    return open_blobs(address)


@given(data=st.binary())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_get_gives_back_what_was_put(either, data):
    blob = either.put(data)
    assert blob == content_hash(data)
    assert either.get(blob) == data
    assert blob in either.ids()


def test_two_levels_of_fan_out(blobs):
    digest = blobs.put(b"x").removeprefix("sha256:")
    assert (blobs.root / digest[:2] / digest[2:4] / digest[4:]).is_file()


def test_equal_content_is_stored_once(blobs):
    assert blobs.put(b"same") == blobs.put(b"same")
    assert len([path for path in blobs.root.rglob("*") if path.is_file()]) == 1


def test_contains(either):
    assert either.put(b"x") in either
    assert content_hash(b"never stored") not in either


def test_missing_blob_is_named(either):
    blob = content_hash(b"never stored")
    with pytest.raises(LogError, match=blob):
        either.get(blob)


@pytest.mark.parametrize("name", ["", "sha256:", "sha256:../../etc/passwd", "md5:" + "0" * 64, "0" * 64])
def test_what_is_no_blob_id_is_refused(either, name):
    with pytest.raises(LogError, match="not a blob id"):
        either.get(name)


@pytest.mark.parametrize("damage", [b"", b"not zlib", b"\x78\x01"])
def test_damaged_file_is_corrupt(blobs, damage):
    blob = blobs.put(b"content")
    blobs.path(blob).write_bytes(damage)
    with pytest.raises(LogError, match="corrupt"):
        blobs.get(blob)


def test_other_content_under_the_name_is_corrupt(blobs):
    blob, other = blobs.put(b"content"), blobs.put(b"other")
    blobs.path(blob).write_bytes(blobs.path(other).read_bytes())
    with pytest.raises(LogError, match="corrupt"):
        blobs.get(blob)


def test_concurrent_writers_of_the_same_content(either):
    data = [bytes([number % 4]) * 10_000 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(either.put, data))
    assert [either.get(blob) for blob in stored] == data
    assert not list(either.root.rglob("*.tmp"))


def test_no_space_left_names_the_folder_and_the_way_out(tmp_path):
    script = """
import os, resource, sys
from pathlib import Path
from nano_shared.snapshot import BlobStore
from nano_shared.errors import LogError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    BlobStore(Path(sys.argv[1])).put(os.urandom(100_000))
except LogError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "blobs")], capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "blobs") in result.stdout
    assert "NANO_HOME" in result.stdout
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


@pytest.mark.as_user
def test_folder_that_cannot_be_written(blobs):
    blobs.root.mkdir(mode=0o500)
    with pytest.raises(LogError, match="cannot write"):
        blobs.put(b"x")
