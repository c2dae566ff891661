"""The tables of the log. People query the views (views.py); only LogStore uses the tables.

Append-only, except for the end of a run. Times are unix seconds. A change here needs a migration and a new
HEAD; `test_schema_equals_migrations` checks it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import sqlalchemy as sa
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
)
from sqlalchemy.engine import Dialect

ESCAPED = "\x1bjson:"
"""begins a text that is stored as JSON"""


class ExactText(sa.TypeDecorator[str]):
    """Text with what databases refuse: NUL, and lone surrogates (bytes of non-UTF-8 file names).

    Such text is stored as a marker and its JSON form; all other text unchanged.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or _plain(value):
            return value
        return ESCAPED + json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is not None and value.startswith(ESCAPED):
            return str(json.loads(value.removeprefix(ESCAPED)))
        return value


class Json(sa.TypeDecorator[Any]):
    """JSON as text, readable where Unicode allows. Keeps the order of keys, infinities and large integers."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        text = json.dumps(value, ensure_ascii=False)
        return text if _plain(text) else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Packed(sa.TypeDecorator[tuple[Any, ...]]):
    """A tuple of numbers as one blob: little-endian, `I` for uint32 ids, `d` for float64 log-probs.

    Log-probs are stored in float64 because a trajectory must come back equal to the one that was appended.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def process_bind_param(self, value: tuple[Any, ...] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else struct.pack(f"<{len(value)}{self.code}", *value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[Any, ...] | None:
        if value is None:
            return None
        count = len(value) // struct.calcsize(f"<{self.code}")
        return struct.unpack(f"<{count}{self.code}", value)


def _plain(text: str) -> bool:
    if "\0" in text or text.startswith(ESCAPED):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


FIRST = HEAD = "0011"
"""oldest and newest migration; revisions are zero-padded numbers, so that they compare as text"""
VERSION_TABLE = "log_version"

metadata = MetaData()

tasks = Table(
    "log_tasks",
    metadata,
    Column("id", ExactText, primary_key=True),  # content hash of the whole task
    Column("key", ExactText, nullable=False),
    Column("prompt", ExactText, nullable=False),
    Column("split", ExactText),
    Column("level", Integer),
    Column("family", ExactText),
    Column("body", Json, nullable=False),  # the whole task, hidden checks included
    Index("log_tasks_key", "key"),
)

runs = Table(
    "log_runs",
    metadata,
    Column("id", ExactText, primary_key=True),
    Column("task_id", ExactText, ForeignKey("log_tasks.id"), nullable=False),
    Column("policy", ExactText, nullable=False),
    Column("profile", ExactText, nullable=False),
    Column("profile_hash", ExactText, nullable=False),
    Column("template_hash", ExactText, nullable=False),
    Column("tools_hash", ExactText, nullable=False),
    Column("runtime_version", ExactText, nullable=False),
    Column("parent", ExactText),  # no foreign key: the parent may live in another log
    Column("parent_step", Integer),  # number of turns that are the parent's; NULL in runs of older versions
    Column("seed", Json),  # seeds may exceed 64 bits
    Column("snapshot", ExactText),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("stop", ExactText),
    Column("stop_detail", ExactText),
    Column("answer", ExactText),
    Column("diff", ExactText, nullable=False),
    Column("given_tools", Json),  # hashes of tools beside the profile's; NULL for none, and in older versions
    Column("directory", ExactText),  # NULL where a task brought its files, and in runs of older versions
    Index("log_runs_started", "started", "id"),
    Index("log_runs_task", "task_id"),
    Index("log_runs_parent", "parent"),
)

turns = Table(
    "log_turns",
    metadata,
    Column("run_id", ExactText, ForeignKey("log_runs.id"), primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("policy_id", ExactText, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("finish", ExactText, nullable=False),
    Column("context_tokens", Integer),  # the four token columns are NULL on a text-only turn
    Column("sampled_tokens", Integer),
    Column("token_row", Integer),
    Column("context_ids", Packed("I")),
    Column("sampled_ids", Packed("I")),
    Column("logprobs", Packed("d")),
    Column("sampling", Json, nullable=False),
    Column("text", ExactText, nullable=False),
    Column("thought", ExactText, nullable=False),
    Column("parse_error", ExactText),
    Column("parser", ExactText, nullable=False),
    Column("repairs", Json, nullable=False),
    Column("messages", Json),  # NULL where nano's own loop asked, and in turns of older versions
    Column("snapshot", ExactText),
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("api", Json),  # what an API returned beside the text; NULL for other policies
    Column("delegated_by", Integer),  # of a sub-agent: the turn that delegated to it; else NULL
)

tool_calls = Table(
    "log_tool_calls",
    metadata,
    Column("run_id", ExactText, primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    # the call; NULL if the observation answers none
    Column("call_name", ExactText),
    Column("arguments", Json),
    # the observation; NULL if the call was never executed
    Column("tool", ExactText),
    Column("ok", Boolean),
    Column("text", ExactText),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("timed_out", Boolean),
    Column("bytes_total", BigInteger),
    Column("truncated", Boolean),
    Column("blob", ExactText),
    Column("files_changed", Json),
    Column("denied_network", Integer),
    Column("denied_secrets", Integer),
    Column("denied_writes_outside", Integer),
    Column("started", Double),
    Column("ended", Double),
    ForeignKeyConstraint(["run_id", "turn"], ["log_turns.run_id", "log_turns.turn"]),
)

verdicts = Table(
    "log_verdicts",
    metadata,
    Column("id", Integer, primary_key=True),  # the verdict with the largest id is the newest
    Column("run_id", ExactText, ForeignKey("log_runs.id"), nullable=False),
    Column("created", Double, nullable=False),
    Column("reward", Double),
    Column("components", Json, nullable=False),
    Column("turn_rewards", Json),
    Column("checks", Json, nullable=False),
    Column("tampering", Json, nullable=False),
    Column("failure_kind", ExactText),
    Column("trust", ExactText, nullable=False),
    Column("grader", ExactText, nullable=False),
    Column("graded_hash", ExactText, nullable=False),
    Column("check_run", Json),
    Column("seal", ExactText),  # `verdict_seal`; NULL: written before there were seals
    Index("log_verdicts_run", "run_id", "id"),
)

requests = Table(
    "log_requests",
    metadata,
    Column("run_id", ExactText, ForeignKey("log_runs.id"), primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("session", ExactText, nullable=False),  # empty for a client that named none
    Column("client", ExactText, nullable=False),  # user agent
    Column("conversation", ExactText, nullable=False),  # hash of all messages up to the answer
    Column("owner", ExactText, nullable=False, server_default=""),  # of the client's key; empty without one
    Index("log_requests_session", "session"),
    Index("log_requests_conversation", "conversation"),
)

feedback = Table(
    "log_feedback",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ExactText, ForeignKey("log_runs.id"), nullable=False),
    Column("turn", Integer),
    Column("span_start", Integer),
    Column("span_end", Integer),
    Column("kind", ExactText, nullable=False),
    Column("value", Double),
    Column("text", ExactText),
    Column("author", ExactText),
    Column("created", Double, nullable=False),
    Index("log_feedback_run", "run_id"),
)

given_tools = Table(
    "log_given_tools",
    metadata,
    Column("hash", ExactText, primary_key=True),
    Column("name", ExactText, nullable=False),
    Column("spec", Json, nullable=False),
    Column("first_seen", Double, nullable=False),
    Index("log_given_tools_name", "name"),
)

notes = Table(  # beside it an index of its text: log_notes_text in SQLite, the column `words` in Postgres
    "log_notes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("project", ExactText, nullable=False),
    Column("text", ExactText, nullable=False),
    Column("run_id", ExactText, nullable=False),  # no foreign key: the run may be deleted or in another log
    Column("turn", Integer, nullable=False),
    Column("private", Boolean, nullable=False),
    Column("created", Double, nullable=False),
    Index("log_notes_project", "project"),
)

NOTES_INDEX = {
    "sqlite": (
        "CREATE VIRTUAL TABLE log_notes_text USING fts5(text, content='log_notes', content_rowid='id')",
        "CREATE TRIGGER log_notes_added AFTER INSERT ON log_notes BEGIN"
        " INSERT INTO log_notes_text(rowid, text) VALUES (new.id, new.text); END",
        "CREATE TRIGGER log_notes_deleted AFTER DELETE ON log_notes BEGIN"
        " INSERT INTO log_notes_text(log_notes_text, rowid, text) VALUES ('delete', old.id, old.text); END",
        "CREATE TRIGGER log_notes_edited AFTER UPDATE ON log_notes BEGIN"
        " INSERT INTO log_notes_text(log_notes_text, rowid, text) VALUES ('delete', old.id, old.text);"
        " INSERT INTO log_notes_text(rowid, text) VALUES (new.id, new.text); END",
    ),
    "postgresql": (
        "ALTER TABLE log_notes ADD COLUMN words tsvector"
        " GENERATED ALWAYS AS (to_tsvector('simple', text)) STORED",
        "CREATE INDEX log_notes_words ON log_notes USING gin (words)",
    ),
}
"""dialect -> statements that make the index of the notes' words"""
