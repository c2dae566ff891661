"""The tools of the domains: what they leave lies in files, and whatever goes wrong is an observation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_coder.sandbox.backend import open_sandbox
from nano_coder.tools.tool import TOOLS, ToolContext, ToolFailure
from nano_shared.types import Limits

FILES = {
    "facts.json": {"Lima": {"founded": 1535}},
    "inbox.json": {"m1": {"from": "ada@example.org", "subject": "Hi", "body": "Call me."}},
    "outbox.json": {},
    "calendar.json": {"e1": {"title": "Talk", "date": "2030-01-02", "time": "09:00", "attendees": ["Ada B"]}},
    "contacts.json": {"Ada B": {"email": "ada@example.org", "phone": "555-1", "team": "legal"}},
}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[ToolContext]:
    for name, value in FILES.items():
        (tmp_path / name).write_text(json.dumps(value))
    (tmp_path / "shop.sql").write_text("CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x;y');")
    (tmp_path / "bad.sql").write_text("CREATE nonsense")
    jail = open_sandbox().open(tmp_path, Limits())
    yield ToolContext(jail=jail, limits=Limits())
    jail.close()


def say(context: ToolContext, tool: str, /, **arguments: Any) -> str:
    return TOOLS[tool](context, arguments).text


def left(context: ToolContext, path: str) -> Any:
    return json.loads(context.jail.read(path))


def test_lookup_shows_what_is_known(context: ToolContext) -> None:
    assert say(context, "lookup", subject=" lima ") == "founded: 1535"


def test_mail_is_read_sent_and_deleted(context: ToolContext) -> None:
    assert say(context, "list_mail") == "m1 from ada@example.org: Hi"
    assert say(context, "read_mail", id="m1").endswith("\n\nCall me.")
    say(context, "send_mail", to="ada@example.org", subject="Re: Hi", body="Yes.\n")
    say(context, "delete_mail", id="m1")
    assert left(context, "outbox.json") == {"ada@example.org": [{"subject": "Re: Hi", "body": "Yes."}]}
    assert left(context, "inbox.json") == {}


def test_events_are_made_moved_and_cancelled(context: ToolContext) -> None:
    said = say(
        context, "create_event", title="Tea", date="2030-01-02", time="16:15", attendees="Zoe A, Ada B,"
    )
    assert said == "created e2"
    say(context, "move_event", id="e1", date="2030-01-03", time="10:00")
    assert say(context, "list_events", date="2030-01-02") == "e2 2030-01-02 16:15 Tea with Ada B, Zoe A"
    say(context, "cancel_event", id="e1")
    assert list(left(context, "calendar.json")) == ["e2"]


def test_contacts_are_found_added_and_changed(context: ToolContext) -> None:
    assert say(context, "find_contact", query="LEGAL") == "Ada B: ada@example.org, 555-1, team legal"
    say(context, "save_contact", name="Ada B", phone="555-2")
    say(context, "save_contact", name="Bo C", email="bo@example.org")
    assert left(context, "contacts.json") == {
        "Ada B": {"email": "ada@example.org", "phone": "555-2", "team": "legal"},
        "Bo C": {"email": "bo@example.org", "phone": "", "team": ""},
    }


def test_sql_builds_the_database_and_runs_every_statement(context: ToolContext) -> None:
    assert say(
        context, "sql", database="shop.db", statement="INSERT INTO t VALUES (2, NULL); SELECT * FROM t"
    ) == ("1 rows changed\na|b\n1|x;y\n2|NULL")
    assert say(context, "sql", database="shop.db", statement="SELECT count(*) FROM t") == "count(*)\n2"


@pytest.mark.parametrize(
    ("database", "statement", "said"),
    [
        ("shop.db", "SELEC 1", "syntax error"),
        ("shop.db", "SELECT * FROM gone", "no such table"),
        ("none.db", "SELECT 1", "no such database: none.db"),
        ("bad.db", "SELECT 1", "syntax error"),
        ("facts.json", "SELECT * FROM sqlite_master", "not a database"),
    ],
)
def test_what_sql_cannot_do_is_said(context: ToolContext, database: str, statement: str, said: str) -> None:
    result = TOOLS["sql"](context, {"database": database, "statement": statement})
    assert not result.ok
    assert said in result.text


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("lookup", {"subject": "Atlantis"}, "nothing is known about 'Atlantis'"),
        ("read_mail", {"id": "m9"}, "no mail 'm9'; there are: m1"),
        ("send_mail", {"to": "Ada", "subject": "s", "body": "b"}, "not one mail address"),
        ("delete_mail", {"id": ""}, "no mail ''"),
        ("create_event", {"title": "t", "date": "2030-02-30", "time": "09:00"}, "not a day"),
        ("create_event", {"title": "t", "date": "2030-02-03", "time": "25:00"}, "not a time"),
        ("move_event", {"id": "e7", "date": "2030-02-03", "time": "09:00"}, "no event 'e7'"),
        ("cancel_event", {"id": "e7"}, "no event 'e7'"),
        ("find_contact", {"query": "nobody"}, "nobody matches"),
        ("save_contact", {"name": "Ada B"}, "at least one of"),
    ],
)
def test_failures_say_what_was_wrong(
    context: ToolContext, name: str, arguments: dict[str, str], said: str
) -> None:
    with pytest.raises(ToolFailure, match=said):
        TOOLS[name](context, arguments)


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"m1": {"from": 1}}', '{"m1": {"x": "y"}}', "[" * 100_000]
)
def test_damaged_records_are_a_failure_and_no_crash(context: ToolContext, damage: str) -> None:
    for path in FILES:
        context.jail.write(path, damage.encode())
    for name, arguments in (("list_mail", {}), ("list_events", {}), ("find_contact", {"query": "a"})):
        with pytest.raises(ToolFailure, match="damaged"):
            TOOLS[name](context, dict(arguments))
