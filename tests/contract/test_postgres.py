"""What only a server has: first openers that race, connections that break, claims across machines, roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from log_values import a_run, a_turn
from postgres_server import SUPERUSER, PostgresServer, running_server

from nano_cluster import postgres
from nano_shared.database import drop_views
from nano_shared.errors import ConfigError, LogError
from nano_shared.printable import without_password
from nano_shared.store import LogStore

HERE = Path(__file__).parent


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database(migrated=True)


def script(code: str, *arguments: str, home: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    if home is not None:
        environment["NANO_HOME"] = str(home)  # as on another machine
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def end_connections(server: PostgresServer) -> None:
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'nano %'"
    )


# ------------------------------------------------------------------------------------ opening


@pytest.mark.slow
def test_first_openers_of_an_empty_database_do_not_race(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = postgres_server.new_database()
    code = """
import sys
from log_values import a_run
from nano_shared import database
sys.stdin.readline()
from nano_shared.store import LogStore
LogStore.open(sys.argv[1]).begin(a_run(sys.argv[2]))
"""
    openers = [script(code, url, f"run{n}", home=tmp_path / str(n)) for n in range(2)]
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("\n")
        opener.stdin.flush()
    for opener in openers:
        opener.communicate()
        assert opener.returncode == 0
    with LogStore.open(url) as store:
        assert sorted(run.id for run in store.runs()) == ["run0", "run1"]


def test_threads_open_an_empty_database_at_once(postgres_server: PostgresServer) -> None:
    for _ in range(1):
        url, together, failed = postgres_server.new_database(), threading.Barrier(6), []

        def opened(url: str = url, together: threading.Barrier = together) -> None:
            together.wait()
            try:
                LogStore.open(url).close()
            except Exception as problem:
                failed.append(problem)  # noqa: B023

        threads = [threading.Thread(target=opened) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def test_an_empty_database_is_no_log_for_readers(postgres_server: PostgresServer) -> None:
    with pytest.raises(LogError, match="is empty; run a task first"):
        LogStore.open(postgres_server.new_database(), create=False)


def test_somebody_elses_database(postgres_server: PostgresServer) -> None:
    url = postgres_server.new_database()
    postgres_server.execute("CREATE TABLE albums (title text)", url.partition("@/")[2].partition("?")[0])
    with pytest.raises(LogError, match=r"some other program's database \(it has tables albums\)"):
        LogStore.open(url)


def test_a_log_of_a_newer_nano(postgres_server: PostgresServer, url: str) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    postgres_server.execute("UPDATE log_version SET version_num = '9999'", name)
    with pytest.raises(LogError, match="newer nano"):
        LogStore.open(url)


def test_a_log_of_an_older_nano_is_migrated(postgres_server: PostgresServer) -> None:
    url = postgres_server.new_database()
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    LogStore.open(url).close()
    with engine.begin() as connection:  # as it was at schema 0008
        drop_views(connection)
        for table, column in (("turns", "delegated_by"), ("requests", "owner"), ("verdicts", "seal")):
            connection.execute(sa.text(f"ALTER TABLE log_{table} DROP COLUMN {column}"))
        connection.execute(sa.text("UPDATE log_version SET version_num = '0008'"))
    with LogStore.open(url) as store:
        store.append(a_run(turns=(a_turn(0),), directory="/here"))
        assert store.get("run1") == a_run(turns=(a_turn(0),), directory="/here")
        assert store.runs()[0].turns == 1


def test_a_database_of_another_encoding_is_refused(postgres_server: PostgresServer) -> None:
    postgres_server.execute(
        "CREATE DATABASE latin OWNER nano TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'"
    )
    with pytest.raises(LogError, match=r"encoding LATIN1; make one with `createdb --encoding UTF8`"):
        LogStore.open(postgres_server.url("latin"))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("postgresql://nano@/nowhere?host={folder}", "does not exist; make it with `createdb`"),
        ("postgresql://stranger@/postgres?host={folder}", "does not exist; make it with `createuser`"),
        ("postgresql://nano:hidden@127.0.0.1:1/x", "refused"),
        ("postgresql+psycopg2://nano:hidden@host/x", "driver"),
        ("postgresql://nano:hidden@host/x?blobs=a&blobs=b", "names one folder"),
        ("postgresql://nano:hidden@host:port/x", "not a database URL"),
    ],
)
def test_an_address_that_leads_nowhere(postgres_server: PostgresServer, address: str, reason: str) -> None:
    with pytest.raises(LogError, match=reason) as caught:
        LogStore.open(address.format(folder=postgres_server.folder))
    assert "hidden" not in str(caught.value)


def test_without_psycopg_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        ConfigError, match=r"needs psycopg .*pip install 'nano-rl-coder\[postgres\]'"
    ) as caught:
        LogStore.open("postgresql://nano:hidden@host/x")
    assert caught.value.exit_code == 3
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hid@den@h:1/x", "postgresql://u:***@h:1/x"),
        ("postgresql://u@h/x?a=b&password=hidden&c=d", "postgresql://u@h/x?a=b&password=***&c=d"),
        ("postgresql://u@h:5432/x", "postgresql://u@h:5432/x"),
        ("/home/u/log.db", "/home/u/log.db"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_the_address_opens_the_same_log_and_blobs(url: str, tmp_path: Path) -> None:
    with LogStore.open(f"{url}&blobs={tmp_path / 'shared blobs'}") as store:
        store.begin(a_run())
        blob = store.put_blob(b"much")
        with LogStore.open(store.address) as again:
            assert again.get("run1") == a_run()
            assert again.get_blob(blob) == b"much"
            assert again.blobs.root == tmp_path / "shared blobs"
        assert "blobs" not in store.url


# ------------------------------------------------------------------------------------ broken connections


def test_idle_connections_that_the_server_drops_are_made_anew(
    postgres_server: PostgresServer, url: str
) -> None:
    with LogStore.open(url) as store:
        store.begin(a_run())
        for index in range(3):
            end_connections(postgres_server)
            store.append_turn("run1", a_turn(index))
            end_connections(postgres_server)
            assert len(store.get("run1").turns) == index + 1


def test_an_idle_connection_is_asked_before_a_reading_that_cannot_be_repeated(
    postgres_server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_UNASKED_SECONDS", 0.0)
    with LogStore.open(url) as store:
        store.append(a_run())
        end_connections(postgres_server)
        assert [run.id for run in store.facts()] == ["run1"]


def test_a_write_whose_connection_breaks_midway_is_repeated(
    postgres_server: PostgresServer, url: str
) -> None:
    from nano_shared import schema

    with LogStore.open(url) as store:
        store.begin(a_run())
        tried = []

        def work(connection: sa.Connection) -> None:
            tried.append(1)
            schema.insert_turns(connection, "run1", (a_turn(0),))
            if len(tried) == 1:
                end_connections(postgres_server)
                connection.scalar(sa.select(1))

        store.database.write(work)
        assert len(tried) == 2
        assert store.get("run1").turns == (a_turn(0),)


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_whose_answer_is_lost_happens_once(
    postgres_server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """The connection breaks before the commit reaches the server, or after and before its answer comes."""
    with LogStore.open(url) as store:
        store.begin(a_run())
        real, broken = sa.Connection._commit_impl, []

        def commit(self: sa.Connection) -> None:
            if broken or self.engine is not store.database.engine:
                return real(self)
            broken.append(1)
            driver = self.connection.driver_connection
            if committed:
                driver.commit()
            end_connections(postgres_server)
            with suppress(Exception):
                driver.execute("SELECT 1")  # which finds the connection broken
            raise sa.exc.OperationalError("COMMIT", None, _dropped())

        monkeypatch.setattr(sa.Connection, "_commit_impl", commit)
        store.append_turn("run1", a_turn(0))
        assert broken
        store.append_turn("run1", a_turn(1))
        assert store.get("run1").turns == (a_turn(0), a_turn(1))


def _dropped() -> Exception:
    import psycopg

    return psycopg.OperationalError("server closed the connection unexpectedly")


@pytest.mark.slow
def test_a_restart_of_the_server_is_waited_for() -> None:
    with running_server() as server:
        with LogStore.open(server.new_database()) as store, store.claim("run1"):
            store.begin(a_run())
            for index, mode in enumerate(("immediate", "fast")):
                server.stop(mode)
                later = threading.Timer(1, server.start)
                later.start()
                store.append_turn("run1", a_turn(index))
                later.join()
            assert len(store.get("run1").turns) == 2
            with LogStore.open(store.address) as other, pytest.raises(LogError, match="is being executed"):
                with other.claim("run1"):  # the claim was taken again after the restart
                    pytest.fail("two hold one run")


@pytest.mark.slow
def test_a_server_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "OUTAGE_SECONDS", 1)
    with running_server() as server:
        with LogStore.open(server.new_database()) as store:
            store.begin(a_run())
            server.stop()
            with pytest.raises(LogError, match=r"log postgresql://nano@/log0.*connection"):
                store.append_turn("run1", a_turn(0))
            server.start()
            store.append_turn("run1", a_turn(0))


def test_a_row_that_another_locks_for_too_long(
    postgres_server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_SESSION", "-c lock_timeout=200ms")
    with LogStore.open(url) as store, LogStore.open(url) as other:
        store.begin(a_run())
        with other.database.engine.begin() as connection:
            connection.exec_driver_sql("SELECT 1 FROM log_runs FOR UPDATE")
            with pytest.raises(LogError, match="another process held it"):
                store.append_turn("run1", a_turn(0))
        store.append_turn("run1", a_turn(0))


# ------------------------------------------------------------------------------------ claims

HOLD = """
import sys
from nano_shared.store import LogStore
with LogStore.open(sys.argv[1]).claim("run1"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_claim_holds_on_another_machine(url: str, tmp_path: Path) -> None:
    holder = script(HOLD, url, home=tmp_path / "elsewhere")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with LogStore.open(url) as store:
        with pytest.raises(LogError, match=f"executed by another process .*pid {holder.pid}"):
            with store.claim("run1"):
                pytest.fail("the run is another's")
        with store.claim("run2"):
            pass
        holder.communicate()
        with store.claim("run1"):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.7])
def test_a_claim_of_a_killed_process_is_free_once_the_server_notices(
    postgres_server: PostgresServer, url: str, tmp_path: Path, moment: float
) -> None:
    holder = script(HOLD, url, home=tmp_path / "elsewhere")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    backends = postgres_server.execute(
        f"SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'nano % pid {holder.pid}'"
    )
    with LogStore.open(url) as store:
        for (backend,) in backends:
            os.kill(backend, signal.SIGSTOP)
        holder.kill()
        holder.communicate()
        notices = threading.Timer(moment, lambda: [os.kill(pid, signal.SIGCONT) for (pid,) in backends])
        notices.start()
        with store.claim("run1"):
            notices.join()


def test_many_claims_take_one_connection(postgres_server: PostgresServer, url: str) -> None:
    with LogStore.open(url) as store, ExitStack() as claims:
        for number in range(50):
            claims.enter_context(store.claim(f"run{number}"))
        name = url.partition("@/")[2].partition("?")[0]
        ((connections,),) = postgres_server.execute(
            f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"
        )
        assert connections <= 3
    ((locks,),) = postgres_server.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    assert locks == 0


def test_a_claim_that_another_took_while_the_connection_was_down_is_reported(
    postgres_server: PostgresServer, url: str
) -> None:
    with LogStore.open(url) as store, LogStore.open(url) as thief:
        store.begin(a_run())
        with store.claim("run1"):
            end_connections(postgres_server)
            with thief.claim("run1"):
                with pytest.raises(LogError, match="run run1 was taken over by another process"):
                    store.append_turn("run1", a_turn(0))


# ------------------------------------------------------------------------------------ queries of users


def test_a_role_that_may_run_programs_asks_no_query(
    postgres_server: PostgresServer, url: str, tmp_path: Path
) -> None:
    proof = postgres_server.folder / "ran"
    queries = (f"COPY (SELECT 1) TO PROGRAM 'touch {proof}'", "SELECT pg_ls_dir('/')", "SELECT 1")
    postgres_server.execute(
        "CREATE ROLE half LOGIN; GRANT pg_execute_server_program, pg_read_all_data TO half"
    )
    for role in (SUPERUSER, "half"):
        with LogStore.open(url.replace("nano@", f"{role}@")) as store:
            for query in queries:
                with pytest.raises(
                    LogError, match=f"role '{role}' may run programs.*CREATE ROLE nano_reader"
                ):
                    store.sql(query)
    with LogStore.open(url) as store:
        for query in queries[:2]:
            with pytest.raises(LogError, match="the query was"):
                store.sql(query)
        assert store.sql("SELECT 1 AS one").rows == [(1,)]
    assert not proof.exists()


def test_the_role_that_the_refusal_names_reads_and_writes_nothing(
    postgres_server: PostgresServer, url: str
) -> None:
    postgres_server.execute("CREATE ROLE nano_reader LOGIN; GRANT pg_read_all_data TO nano_reader")
    with LogStore.open(url) as store:
        store.begin(a_run())
    with LogStore.open(url.replace("nano@", "nano_reader@"), create=False) as reader:
        assert reader.sql("SELECT id FROM runs WHERE id LIKE 'run%'").rows == [("run1",)]
        assert reader.get("last") == a_run()
        with pytest.raises(LogError, match=r"the role lacks a right .*GRANT"):
            reader.append_turn("run1", a_turn(0))


def test_a_query_changes_no_later_session(url: str) -> None:
    with LogStore.open(url) as store:
        store.sql("SELECT set_config('default_transaction_read_only', 'on', false)")
        store.sql("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        store.begin(a_run())


# ------------------------------------------------------------------------------------ many writers

WRITER = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from log_values import a_run, a_turn
from nano_shared.store import LogStore
with LogStore.open(sys.argv[1]) as store:
    def write(number):
        name = f"{sys.argv[2]}-{number}"
        with store.claim(name):
            store.begin(a_run(name))
            for index in range(8):
                store.append_turn(name, a_turn(index))
        return name
    with ThreadPoolExecutor(8) as pool:
        print(json.dumps(list(pool.map(write, range(24)))))
"""


@pytest.mark.slow
@pytest.mark.slow
def test_64_writers_lose_nothing_while_connections_break(
    postgres_server: PostgresServer, url: str, tmp_path: Path
) -> None:
    """Eight processes of eight threads, on eight machines."""
    writers = [script(WRITER, url, f"w{n}", home=tmp_path / str(n)) for n in range(8)]
    for _ in range(20):
        time.sleep(1)
        postgres_server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'nano %' AND random() < 0.1"
        )
    names = [name for writer in writers for name in json.loads(writer.communicate()[0])]
    assert [writer.returncode for writer in writers] == [0] * 8
    assert len(names) == 192
    with LogStore.open(url) as store:
        runs = {run.id: run for run in store.trajectories()}
    assert set(runs) == set(names)
    assert all(run.turns == tuple(a_turn(index) for index in range(8)) for run in runs.values())


def test_facts_of_many_runs_are_streamed_by_a_cursor(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from psycopg import ServerCursor

    from nano_shared import run_facts

    monkeypatch.setattr(run_facts, "_BATCH", 5)
    with LogStore.open(url) as store:
        for number in range(12):
            store.append(a_run(f"r{number:02}", turns=(a_turn(0),), started=float(number)))
        cursors = []
        sa.event.listen(
            store.database.engine, "before_cursor_execute", lambda _, cursor, *__: cursors.append(cursor)
        )
        assert [run.id for run in store.facts()] == [f"r{number:02}" for number in range(12)]
    assert any(isinstance(cursor, ServerCursor) for cursor in cursors)
