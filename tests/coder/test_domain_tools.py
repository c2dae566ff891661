"""The tools of the domains: what they leave lies in files, and whatever goes wrong is an observation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.tool import TOOLS, ToolContext, ToolFailure
from nano_shared.types import Limits

FILES = {
    "facts.json": {"Lima": {"founded": 1535}},
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


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"lima": 1}', "[" * 100_000])
def test_damaged_records_are_a_failure_and_no_crash(context: ToolContext, damage: str) -> None:
    context.jail.write("facts.json", damage.encode())
    with pytest.raises(ToolFailure, match="damaged"):
        say(context, "lookup", subject="lima")


def test_what_nobody_knows_is_said(context: ToolContext) -> None:
    with pytest.raises(ToolFailure, match="nothing is known about 'Atlantis'"):
        say(context, "lookup", subject="Atlantis")
