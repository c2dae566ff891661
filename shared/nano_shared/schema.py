"""The tables of the log. People query the views (views.py); only LogStore touches these.

Append-only but for the end of a run. Times are unix seconds. A change here is a new migration, and a new
HEAD; `test_schema_equals_migrations` holds the two together.
"""

from __future__ import annotations

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

from nano_shared.columns import ExactText, Json, Packed

HEAD = "0004"
"""newest migration; revisions are zero-padded numbers, so that text comparison says which is newer"""
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
    Column("parent_step", Integer),  # turns that are the parent's; NULL where none can be
    Column("seed", Json),  # seeds may exceed 64 bits
    Column("snapshot", ExactText),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("stop", ExactText),
    Column("stop_detail", ExactText),
    Column("answer", ExactText),
    Column("diff", ExactText, nullable=False),
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
    Column("snapshot", ExactText),
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
)

tool_calls = Table(
    "log_tool_calls",
    metadata,
    Column("run_id", ExactText, primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    # what was asked; NULL where an observation answers no call
    Column("call_name", ExactText),
    Column("arguments", Json),
    # what happened; NULL where the call was never executed
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
    Column("id", Integer, primary_key=True),  # the largest of a run is its newest verdict
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
    Index("log_verdicts_run", "run_id", "id"),
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
