"""Opening a log: what is refused and why, and migrations from the oldest schema."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from log_values import a_run, a_turn

from nano_shared import database, schema
from nano_shared.errors import LogError
from nano_shared.store import LogStore


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    with LogStore.open(path) as store:
        store.begin(a_run())
    return path


# ------------------------------------------------------------------------------------ where it is


def test_the_default_is_in_nano_home(tmp_path, monkeypatch):
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    with LogStore.open() as store:
        assert store.url == str(tmp_path / "home" / "log.db")
        assert store.blobs.root == tmp_path / "home" / "blobs"


def test_a_path_and_a_url_name_the_same_log(log):
    for name in (log, str(log), f"sqlite:///{log}"):
        with LogStore.open(name, create=False) as store:
            assert store.get("run1") == a_run()


def test_reading_makes_no_log(tmp_path):
    with pytest.raises(LogError, match=r"there is no log at .*log\.db; run a task first"):
        LogStore.open(tmp_path / "no" / "log.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_wal_and_a_committed_turn_is_on_disk(log):
    with LogStore.open(log) as store:
        store.append_turn("run1", a_turn())
    with closing(sqlite3.connect(log)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_opening_an_up_to_date_log_imports_no_alembic(log):
    code = "import sys; from nano_shared.store import LogStore; LogStore.open(sys.argv[1]).get('last'); "
    code += "print('alembic' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


# ------------------------------------------------------------------------------------ refusals


def refusal(name: object) -> str:
    with pytest.raises(LogError) as caught:
        LogStore.open(name)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n" * 100)
    assert "it is not an SQLite file" in refusal(path)
    assert path.read_text() == "dear diary\n" * 100


def test_somebody_elses_database(tmp_path):
    path = tmp_path / "other.db"
    execute(path, "CREATE TABLE albums (title TEXT)")
    before = path.read_bytes()
    assert "some other program's database (it has tables albums)" in refusal(path)
    assert path.read_bytes() == before


def test_a_log_of_a_newer_nano(log):
    execute(log, f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'")
    message = refusal(log)
    assert "newer nano (schema 9999" in message
    assert "upgrade nano" in message


def test_a_directory(tmp_path):
    for folder in (tmp_path, Path("/")):
        assert "is a directory; name the file in it" in refusal(folder)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot make its folder" in refusal(tmp_path / "file" / "log.db")


@pytest.mark.as_user
def test_a_folder_that_cannot_be_written(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    assert f"{folder} is not writable" in refusal(folder / "log.db")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_log_in_memory(url):
    assert "would keep nothing" in refusal(url)


@pytest.mark.parametrize(
    ("url", "reason"), [("nosuchdb://host/log", "driver is not installed"), ("://", "not a database URL")]
)
def test_a_url_that_leads_nowhere(url, reason):
    assert reason in refusal(url)


def test_an_empty_file_becomes_a_log(tmp_path):
    path = tmp_path / "log.db"
    path.touch()
    with pytest.raises(LogError, match="is empty"):
        LogStore.open(path, create=False)
    with LogStore.open(path) as store:
        store.begin(a_run())


def test_a_full_disk_names_the_log_and_the_way_out(log):
    def limit(connection, _record):
        connection.execute("PRAGMA max_page_count=1")

    sa.event.listen(sa.Engine, "connect", limit)
    try:
        with LogStore.open(log) as store, pytest.raises(LogError, match=r"log\.db: no space left.*NANO_HOME"):
            store.append(a_run("run2", diff="x" * 1_000_000))
    finally:
        sa.event.remove(sa.Engine, "connect", limit)
    with LogStore.open(log) as store:
        assert [run.id for run in store.runs()] == ["run1"]


def test_a_lock_that_is_never_released(log, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(log, isolation_level=None)) as other, LogStore.open(log) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogError, match="another process held it"):
            store.append_turn("run1", a_turn())
        assert store.get("run1") == a_run()  # readers do not wait
        other.execute("ROLLBACK")
        store.append_turn("run1", a_turn())


def test_a_write_that_has_waited_its_time_is_not_begun_again(log, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.05)
    once, tried = database.Database.write_once, []
    monkeypatch.setattr(database.Database, "write_once", lambda *given: tried.append(1) or once(*given))
    with closing(sqlite3.connect(log, isolation_level=None)) as other, LogStore.open(log) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogError, match="another process held it"):
            store.append_turn("run1", a_turn())
    assert len(tried) == 1


# ------------------------------------------------------------------------------------ migrations

OLDEST = Path(__file__).parent / "data" / "oldest_log.sql"
"""a log with one run as the first state of this repository wrote it, schema 0001"""


def oldest_log(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLDEST.read_text())


def test_the_oldest_log_is_migrated_and_read(tmp_path):
    path = tmp_path / "log.db"
    oldest_log(path)
    with LogStore.open(path) as store:
        assert store.get("run1") == a_run(turns=(a_turn(0),))
        store.append_turn("run1", a_turn(1))
        assert store.runs()[0].turns == 2


def test_head_is_the_newest_migration():
    folder = Path(database.__file__).parent / "migrations"
    assert ScriptDirectory(str(folder)).get_current_head() == schema.HEAD


@pytest.mark.parametrize("begun", ["new", "oldest"])
def test_schema_equals_migrations(begun, tmp_path):
    log = tmp_path / "log.db"
    if begun == "oldest":
        oldest_log(log)
    LogStore.open(log).close()
    engine = sa.create_engine(f"sqlite:///{log}")
    with engine.connect() as connection:
        # an index of full text has tables of its own
        options = {
            "version_table": schema.VERSION_TABLE,
            "compare_type": False,
            "include_name": lambda name, kind, _: not (kind == "table" and name.startswith("log_notes_text")),
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_a_failed_migration_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "log.db"

    def interrupted(_connection):
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "create_views", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LogStore.open(path)
    monkeypatch.undo()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    with LogStore.open(path) as store:
        store.begin(a_run())
