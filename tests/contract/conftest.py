"""The log's tests run on SQLite and on Postgres alike."""

from __future__ import annotations

import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer, missing, running_server

from nano_shared import store
from nano_shared.database import Database, open_database


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    if reason := missing():
        pytest.skip(reason)
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of a server of the S3 protocol, which holds its objects in memory."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def object_store(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """That URL, with an environment in which it is where buckets are."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_REGION": "us-east-1", "NANO_HOME": str(tmp_path / "home"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def bucket(object_store: str) -> str:
    """Address of an empty bucket."""
    name = f"nano-{secrets.token_hex(4)}"
    make = urllib.request.Request(f"{object_store}/{name}", method="PUT")
    urllib.request.urlopen(make).close()
    return f"s3://{name}/blobs"


@pytest.fixture(params=["sqlite", "postgres"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both databases in turn. On Postgres each path that is opened is a database of its own, with the blobs
    beside the path."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        urls: dict[Path, str] = {}

        def opened(url: str | Path | None, *, create: bool) -> Database:
            if url is not None and "://" not in str(url):
                path = Path(url)
                if path not in urls:
                    urls[path] = f"{server.new_database(migrated=True)}&blobs={path.parent / 'blobs'}"
                url = urls[path]
            return open_database(url, create=create)

        monkeypatch.setattr(store, "open_database", opened)
    return str(request.param)


@pytest.fixture
def log(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A log that does not exist yet, or an empty database: what a process of a test's own opens."""
    if backend == "sqlite":
        return str(tmp_path / "log.db")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return f"{server.new_database()}&blobs={tmp_path / 'blobs'}"
