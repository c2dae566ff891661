"""Notes of a project: found by their words, without secrets, within a budget, in both databases."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nano_logs.redact.redactor import Redactor
from nano_shared import agent_notes as module
from nano_shared.agent_notes import LONGEST_NOTE, Notes
from nano_shared.errors import UsageError
from nano_shared.store import LogStore

SECRET = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogStore]:
    sqlite = request.param == "sqlite"
    url = tmp_path / "log.db" if sqlite else request.getfixturevalue("postgres_server").new_database()
    with LogStore.open(url, blobs=tmp_path / "blobs") as opened:
        yield opened
        opened.notes(None, Redactor().scrub).forget(None)


def of(store: LogStore, project: str | None = "/p") -> Notes:
    return store.notes(project, Redactor().scrub)


def told(notes: Notes, query: str = "", run: str = "r") -> list[str]:
    return [note.text for note in notes.recall(query, run_id=run)]


def test_a_note_is_found_by_its_words(store: LogStore) -> None:
    notes = of(store)
    notes.remember("The tests run with make check.", run_id="r1", turn=3)
    notes.remember("The release branch is called stable.", run_id="r1", turn=4)
    assert told(notes, "how do I run the tests?")[0] == "The tests run with make check."
    assert told(notes, "STABLE release")[0] == "The release branch is called stable."
    assert told(notes, "nothing of that") == []
    assert len(told(notes)) == 2
    (found,) = notes.recall("stable", run_id="r")
    assert (found.project, found.run_id, found.turn, found.private) == ("/p", "r1", 4, False)


def test_projects_are_apart(store: LogStore) -> None:
    of(store, "/p").remember("mine", run_id="r", turn=0)
    assert told(of(store, "/q"), "mine") == []
    assert told(of(store, None), "mine") == ["mine"]


@pytest.mark.parametrize(
    "query", ['"', "a AND", "NEAR(x", "text:y", "*", "'; DROP TABLE log_notes", "ü & |", "-x"]
)
def test_no_query_is_syntax(store: LogStore, query: str) -> None:
    of(store).remember("some text", run_id="r", turn=0)
    told(of(store), query)


def test_secrets_are_left_out(store: LogStore) -> None:
    note, secrets = of(store).remember(f"the token is {SECRET}", run_id="r", turn=0)
    assert secrets == 1
    assert SECRET not in note.text
    assert SECRET not in of(store).edit(note.id, f"now {SECRET}").text


def test_an_equal_note_is_kept_once(store: LogStore) -> None:
    one, _ = of(store).remember("same", run_id="r1", turn=0)
    other, _ = of(store).remember(" same\n", run_id="r2", turn=5)
    assert one == other


def test_the_budget(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NOTES", 3)
    for number in range(3):
        of(store).remember(f"note {number}", run_id="r", turn=0)
    with pytest.raises(UsageError, match="3 notes, the most"):
        of(store).remember("one more", run_id="r", turn=0)
    of(store, "/q").remember("one more", run_id="r", turn=0)
    of(store).for_forks().remember("of a fork", run_id="f", turn=0)
    for text, said in [("x" * (LONGEST_NOTE + 1), "say less"), (" \n", "nothing to remember")]:
        with pytest.raises(UsageError, match=said):
            of(store).remember(text, run_id="r", turn=0)


def test_what_a_fork_writes_is_seen_by_it_alone(store: LogStore) -> None:
    of(store).remember("shared fact", run_id="r", turn=0)
    of(store).for_forks().remember("forked fact", run_id="fork-1", turn=1)
    assert sorted(told(of(store), "fact", "fork-1")) == ["forked fact", "shared fact"]
    assert told(of(store), "fact", "fork-2") == ["shared fact"]


def test_edited_and_forgotten_notes_are_found_no_more(store: LogStore) -> None:
    notes = of(store)
    first, _ = notes.remember("the port is fivethousand", run_id="r", turn=0)
    second, _ = notes.remember("the host is local", run_id="r", turn=0)
    notes.edit(first.id, "the port is eighty")
    assert told(notes, "fivethousand") == []
    assert told(notes, "eighty") == ["the port is eighty"]
    assert notes.forget([first.id]) == 1
    assert told(notes, "eighty") == []
    assert [note.id for note in notes.all()] == [second.id]
    with pytest.raises(UsageError, match=f"no note {first.id}"):
        notes.edit(first.id, "x")
    assert notes.forget(None) == 1


def test_a_forgotten_text_is_not_in_the_file(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        of(store).remember("the word is xylophonist", run_id="r", turn=0)
        of(store).forget(None)
    with closing(sqlite3.connect(tmp_path / "log.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"xylophonist" not in (tmp_path / "log.db").read_bytes()
