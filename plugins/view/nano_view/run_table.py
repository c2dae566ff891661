"""The runs of a log as lists need them, in one table in memory: what a run took, and no long text.

The table follows the log, and holds the runs that the user sees and no others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSON

from nano_shared import schema
from nano_shared.store import LogStore

T = TypeVar("T")
PROMPT = 400
"""characters of a prompt that are kept"""
VIEWED = (
    "id", "parent", "task_key", "policy", "policy_id", "prompt", "stop", "failure_kind", "trust", "family",
    "directory", "project", "parent_step", "reward", "turns", "sampled_tokens", "trainable", "started",
    "ended", "level",
)  # fmt: skip
"""columns of the view `runs`"""
USED = {"read": ("context_tokens", "prompt"), "cached": (None, "cached"),
        "written": ("sampled_tokens", "completion"), "cost": (None, "cost")}  # fmt: skip
"""column -> what it adds up over a run's own turns: a column of theirs, else what an API said of its usage"""
_BATCH = 500
"""runs that are read at a time"""
_view = sa.table("runs", *(sa.column(name) for name in VIEWED))


class RunTable:
    """A table `runs` with the columns VIEWED and USED; texts are as the log stores them."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        pool, everywhere = sa.StaticPool, {"check_same_thread": False}
        self._engine = sa.create_engine("sqlite://", poolclass=pool, connect_args=everywhere)
        self._stamp: tuple[int, ...] | None = None
        self._known: dict[str, float | None] = {}
        """run -> when it ended"""
        self._verdict = 0
        """the newest that is known"""
        with self._engine.begin() as own:
            own.exec_driver_sql(f"CREATE TABLE runs (id PRIMARY KEY, {', '.join([*VIEWED[1:], *USED])})")
            for columns in ("started, id", "task_key, parent_step, parent", "parent"):
                own.exec_driver_sql(f"CREATE INDEX '{columns}' ON runs ({columns})")

    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """The result of a function that reads the table, as the log is now."""
        with self._lock, self._engine.begin() as own:
            stamp = self._store.stamp()
            if stamp is None or stamp != self._stamp:
                self._known, self._verdict = self._store.read(lambda log: self._follow(log, own))
                self._stamp = stamp
            return query(own)

    def _follow(self, log: sa.Connection, own: sa.Connection) -> tuple[dict[str, float | None], int]:
        """Take over what is new or open, or has ended or was judged since; forget what was deleted."""
        runs, verdicts, user = schema.runs.c, schema.verdicts.c, self._store.user
        seen = sa.select(sa.type_coerce(runs.id, sa.Text), runs.ended)
        seen = seen if user is None else seen.where(user.sees(runs))
        now: dict[str, float | None] = {run: ended for run, ended in log.execute(seen)}
        later = verdicts.id > self._verdict
        judged = set(log.scalars(sa.select(sa.type_coerce(verdicts.run_id, sa.Text)).where(later)))
        before = self._known.get
        changed = [run for run, end in now.items() if end is None or before(run) != end or run in judged]
        places = ", ".join("?" * (len(VIEWED) + len(USED)))
        for first in range(0, len(changed), _BATCH):
            rows = log.execute(_rows(log.dialect.name, changed[first : first + _BATCH]))
            own.exec_driver_sql(f"INSERT OR REPLACE INTO runs VALUES ({places})", [tuple(r) for r in rows])
        if gone := self._known.keys() - now.keys():
            own.exec_driver_sql("DELETE FROM runs WHERE id = ?", [(run,) for run in gone])
        return now, log.scalar(sa.select(sa.func.max(verdicts.id))) or 0


def _rows(dialect: str, ids: Sequence[str]) -> sa.Select[Any]:
    turns, runs = schema.turns.c, schema.runs.c
    run = sa.type_coerce(turns.run_id, sa.Text)
    sums = [
        sa.func.sum(sa.func.coalesce(turns[column], said) if column else said).label(name)
        for name, (column, field) in USED.items()
        for said in [_usage(dialect, field)]
    ]
    used = sa.select(turns.run_id, *sums).join_from(schema.turns, schema.runs)
    used = used.where(run.in_(ids), turns.turn >= sa.func.coalesce(runs.parent_step, 0))
    own = used.group_by(turns.run_id).subquery()
    columns: list[sa.ColumnElement[Any]] = [_view.c[name] for name in VIEWED]
    columns[VIEWED.index("prompt")] = sa.func.substr(_view.c.prompt, 1, PROMPT)
    query = sa.select(*columns, *(own.c[name] for name in USED))
    return query.outerjoin_from(_view, own, own.c.run_id == _view.c.id).where(_view.c.id.in_(ids))


def _usage(dialect: str, field: str) -> sa.ColumnElement[Any]:
    """SQL: a number of what an API said that it used for a turn."""
    api = sa.type_coerce(schema.turns.c.api, sa.Text)
    if dialect == "sqlite":
        return sa.func.json_extract(api, f"$.usage.{field}")
    return sa.cast(sa.cast(api, JSON)[("usage", field)].astext, sa.Double)
