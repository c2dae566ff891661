"""A logged run redacted where it stands: the one place where the log is not append-only."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from nano_shared import journal, schema
from nano_shared.database import Database
from nano_shared.errors import UsageError
from nano_shared.redact.known import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.redact.trajectory import learn, scrub_trajectory, scrub_value
from nano_shared.rows import run_row
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


def redact_run(store: LogStore, run_id: str, redactor: Redactor) -> bool:
    """Replace a run by its redacted self, in one transaction; whether anything changed.

    Every id of a run that holds a secret is masked, since no tokenizer is at hand. What the rows held is
    overwritten in an SQLite file, its write-ahead log included; a server's backups are its own. Raises
    LogError for an unknown run or one that is being executed, UsageError for one that has not ended.
    """
    with store.claim(run_id):
        before = store.get(run_id)
        if before.stop is None:
            raise UsageError(f"run {run_id} has not ended; nano-coder resume {run_id} goes on with it first")
        after = scrub_trajectory(before, redactor=redactor, blobs=store.blobs)
        known = Known()
        learn(before, redactor, known)
        changed = store._database.write(lambda connection: _rewrite(connection, after, redactor, known))
        changed |= after != before
        if changed:
            _forget(store._database)
        return changed


def _rewrite(connection: sa.Connection, run: Trajectory, redactor: Redactor, known: Known) -> bool:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    old_task = connection.scalar(sa.select(schema.runs.c.task_id).where(schema.runs.c.id == run.id))
    task_id = journal.insert_task(connection, run.task)
    row = run_row(run, task_id)
    connection.execute(schema.runs.update().where(schema.runs.c.id == run.id).values(**row))
    for table in (schema.tool_calls, schema.turns):
        connection.execute(table.delete().where(table.c.run_id == run.id))
    journal.insert_turns(connection, run.id, run.turns)
    left = sa.select(sa.literal(1)).where(schema.runs.c.task_id == old_task).limit(1)
    if connection.scalar(left) is None:
        connection.execute(schema.tasks.delete().where(schema.tasks.c.id == old_task))
    # a list: every row is to be looked at, also behind one that changed
    return any(
        [
            _scrub_rows(connection, table, run.id, redactor, known)
            for table in (schema.verdicts, schema.feedback)
        ]
    )


def _scrub_rows(
    connection: sa.Connection, table: sa.Table, run_id: str, redactor: Redactor, known: Known
) -> bool:
    changed = False
    for row in connection.execute(sa.select(table).where(table.c.run_id == run_id)).mappings().all():
        old: dict[str, Any] = {name: value for name, value in row.items() if name not in ("id", "run_id")}
        learn(old, redactor, known)
        new = scrub_value(old, redactor, known)
        if new != old:
            connection.execute(table.update().where(table.c.id == row["id"]).values(**new))
            changed = True
    return changed


def _forget(database: Database) -> None:
    """Leave nothing of the old rows in the pages of an SQLite file."""
    if database.is_sqlite:
        with database.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute("VACUUM")
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
