"""The log's tests run on SQLite and on Postgres alike."""

from __future__ import annotations

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
