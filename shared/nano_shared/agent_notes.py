"""Notes: what an agent remembers of a project across its runs, in the log's database.

Full-text search is SQLite's FTS5 or Postgres's tsvector. Secrets are taken out before a note is written. A
private note, of a fork or a rollout, is seen by the run that wrote it and by no other.
Notes of one attempt at a task lie in a database in memory: what the agent is shown of a note is its number
and its rank, so that a shared database would make runs depend on what others write at the same time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import sqlalchemy as sa

from nano_shared.database import Database
from nano_shared.errors import UsageError
from nano_shared.schema import NOTES_INDEX, notes
from nano_shared.types import Value

Scrub = Callable[[str], tuple[str, Sequence[object]]]
"""a text without its secrets, and what they were"""
LONGEST_NOTE = 2000
"""characters"""
MOST_NOTES = 500
"""of one project, private ones not counted"""
_MOST_WORDS = 32
"""words of a query that are looked for"""


class Note(Value):
    id: int
    project: str
    """absolute path of the directory"""
    text: str
    run_id: str
    """run that wrote it"""
    turn: int
    private: bool
    created: float
    """unix seconds"""


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one project, or of all (None)."""

    database: Database
    project: str | None
    scrub: Scrub
    private: bool = False
    """whether what is written is seen by its own run alone"""

    def for_forks(self) -> Notes:
        return replace(self, private=True)

    def remember(self, text: str, *, run_id: str, turn: int) -> tuple[Note, int]:
        """Write a note. Returns it, and the number of secrets that were taken out; an equal note is returned
        as it is. Raises UsageError for an empty or too long text, and where the project has too many."""
        text, secrets = self.checked(text)
        row = {
            "project": self.project, "text": text, "run_id": run_id, "turn": turn, "private": self.private,
            "created": time.time(),
        }  # fmt: skip

        def work(connection: sa.Connection) -> Note:
            there = connection.execute(
                sa.select(notes).where(self._visible_to(run_id), notes.c.text == text).limit(1)
            )
            if (equal := there.mappings().one_or_none()) is not None:
                return Note(**equal)
            number = sa.select(sa.func.count()).where(self._of_project(), ~notes.c.private)
            if not self.private and (connection.scalar(number) or 0) >= MOST_NOTES:
                raise UsageError(
                    f"the project has {MOST_NOTES} notes, the most that are kept; nano-coder memory forget"
                    " makes room"
                )
            key = connection.execute(notes.insert(), row).inserted_primary_key
            return Note(id=key[0], **row)  # type: ignore[index]

        return self.database.write(work), secrets

    def recall(self, query: str, *, run_id: str, most: int = 10) -> Sequence[Note]:
        """The notes that hold most of the query's words, best first; the newest for a query without words."""
        return self._find(query, self._visible_to(run_id), most)

    def all(self, query: str = "") -> Sequence[Note]:
        """The notes, those that hold words of the query if it has any; private ones too."""
        return self._find(query, self._of_project(), None)

    def edit(self, note: int, text: str) -> Note:
        """Raises UsageError for a note that is not there, and for a text that cannot be kept."""
        text, _ = self.checked(text)

        def work(connection: sa.Connection) -> Note:
            found = connection.execute(
                notes.update().where(notes.c.id == note, self._of_project()).values(text=text)
            )
            if not found.rowcount:
                raise UsageError(f"no note {note}; nano-coder memory list shows those there are")
            row = connection.execute(sa.select(notes).where(notes.c.id == note)).mappings().one()
            return Note(**row)

        return self.database.write(work)

    def forget(self, chosen: Sequence[int] | None) -> int:
        """Delete notes, None for all of the project, and their text in the file. Returns their number."""

        def work(connection: sa.Connection) -> int:
            sqlite = connection.dialect.name == "sqlite"
            if sqlite:
                connection.exec_driver_sql("PRAGMA secure_delete=ON")
            query = notes.delete().where(self._of_project())
            if chosen is not None:
                query = query.where(notes.c.id.in_(chosen))
            number = connection.execute(query).rowcount
            if sqlite:
                connection.exec_driver_sql("INSERT INTO log_notes_text(log_notes_text) VALUES('optimize')")
            return number

        return self.database.write(work)

    def checked(self, text: str) -> tuple[str, int]:
        """The text without its secrets, and their number. Raises UsageError for one that cannot be kept."""
        text, spans = self.scrub(text.strip())
        if not text:
            raise UsageError("there is nothing to remember: the text is empty")
        if len(text) > LONGEST_NOTE:
            raise UsageError(f"the note has {len(text)} characters, more than {LONGEST_NOTE}; say less")
        return text, len(spans)

    def _find(self, query: str, allowed: sa.ColumnElement[bool], most: int | None) -> Sequence[Note]:
        words = re.findall(r"\w+", query.casefold())[:_MOST_WORDS]

        def work(connection: sa.Connection) -> Sequence[Note]:
            chosen = sa.select(notes).where(allowed).limit(most)
            if not words:
                chosen = chosen.order_by(notes.c.id.desc())
            elif connection.dialect.name == "sqlite":
                chosen = _by_fts5(chosen, words)
            else:
                chosen = _by_tsvector(chosen, words)
            return [Note(**row) for row in connection.execute(chosen).mappings()]

        return self.database.read(work)

    def _of_project(self) -> sa.ColumnElement[bool]:
        return sa.true() if self.project is None else notes.c.project == self.project

    def _visible_to(self, run_id: str) -> sa.ColumnElement[bool]:
        return self._of_project() & sa.or_(~notes.c.private, notes.c.run_id == run_id)


_Chosen = sa.Select[tuple[object, ...]]


def _by_fts5(chosen: _Chosen, words: Sequence[str]) -> _Chosen:
    index = sa.table("log_notes_text", sa.column("rowid"), sa.column("rank"))
    match = sa.text("log_notes_text MATCH :words").bindparams(words=" OR ".join(f'"{w}"' for w in words))
    return chosen.join(index, index.c.rowid == notes.c.id).where(match).order_by(index.c.rank, notes.c.id)


def _by_tsvector(chosen: _Chosen, words: Sequence[str]) -> _Chosen:
    column: sa.ColumnElement[str] = sa.literal_column("log_notes.words")
    query = sa.func.to_tsquery("simple", " | ".join(words))
    rank = sa.func.ts_rank(column, query)
    return chosen.where(column.op("@@")(query)).order_by(rank.desc(), notes.c.id)


PROJECT = "attempt"


@contextmanager
def attempt_notes(scrub: Scrub) -> Iterator[Notes]:
    """An empty store of notes, which is gone at the end: one connection, for one thread after another."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    with closing(Database(engine)) as database:
        database.write(_make_table)
        yield Notes(database, PROJECT, scrub)


def _make_table(connection: sa.Connection) -> None:
    notes.create(connection)
    for statement in NOTES_INDEX["sqlite"]:
        connection.exec_driver_sql(statement)
