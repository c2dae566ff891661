"""First schema: runs, tasks, turns, tool calls, verdicts and feedback.

A migration is history: it spells out its tables, and never changes when schema.py does.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _tasks_and_runs()
    _turns()
    _tool_calls()
    _verdicts_and_feedback()


def downgrade() -> None:
    for name in ("feedback", "verdicts", "tool_calls", "turns", "runs", "tasks"):
        op.drop_table(f"log_{name}")


def _tasks_and_runs() -> None:
    op.create_table(
        "log_tasks",
        sa.Column("id", sa.Text, primary_key=True),
        *_texts("key", "prompt"),
        *_nullable_texts("split", "family"),
        sa.Column("level", sa.Integer),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("log_tasks_key", "log_tasks", ["key"])
    op.create_table(
        "log_runs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("task_id", sa.Text, sa.ForeignKey("log_tasks.id"), nullable=False),
        *_texts("policy", "profile", "profile_hash", "template_hash", "tools_hash", "runtime_version"),
        *_nullable_texts("parent", "seed", "snapshot"),
        sa.Column("started", sa.Double, nullable=False),
        sa.Column("ended", sa.Double),
        *_nullable_texts("stop", "stop_detail", "answer"),
        *_texts("diff"),
    )
    op.create_index("log_runs_started", "log_runs", ["started", "id"])
    op.create_index("log_runs_task", "log_runs", ["task_id"])
    op.create_index("log_runs_parent", "log_runs", ["parent"])


def _turns() -> None:
    op.create_table(
        "log_turns",
        sa.Column("run_id", sa.Text, sa.ForeignKey("log_runs.id"), primary_key=True),
        sa.Column("turn", sa.Integer, primary_key=True),
        *_texts("policy_id"),
        sa.Column("policy_version", sa.Integer, nullable=False),
        *_texts("finish"),
        *(sa.Column(name, sa.Integer) for name in ("context_tokens", "sampled_tokens", "token_row")),
        *(sa.Column(name, sa.LargeBinary) for name in ("context_ids", "sampled_ids", "logprobs")),
        *_texts("sampling", "text", "thought"),
        *_nullable_texts("parse_error"),
        *_texts("parser", "repairs"),
        *_nullable_texts("snapshot"),
        sa.Column("started", sa.Double, nullable=False),
        sa.Column("ended", sa.Double, nullable=False),
    )


def _tool_calls() -> None:
    op.create_table(
        "log_tool_calls",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("turn", sa.Integer, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        *_nullable_texts("call_name", "arguments", "tool"),
        sa.Column("ok", sa.Boolean),
        *_nullable_texts("text"),
        sa.Column("exit_code", sa.Integer),
        sa.Column("signal", sa.Integer),
        sa.Column("timed_out", sa.Boolean),
        sa.Column("bytes_total", sa.BigInteger),
        sa.Column("truncated", sa.Boolean),
        *_nullable_texts("blob", "files_changed"),
        *(sa.Column(f"denied_{what}", sa.Integer) for what in ("network", "secrets", "writes_outside")),
        sa.Column("started", sa.Double),
        sa.Column("ended", sa.Double),
        sa.ForeignKeyConstraint(["run_id", "turn"], ["log_turns.run_id", "log_turns.turn"]),
    )


def _verdicts_and_feedback() -> None:
    op.create_table(
        "log_verdicts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Text, sa.ForeignKey("log_runs.id"), nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("reward", sa.Double),
        *_texts("components"),
        *_nullable_texts("turn_rewards"),
        *_texts("checks", "tampering"),
        *_nullable_texts("failure_kind"),
        *_texts("trust", "grader", "graded_hash"),
    )
    op.create_index("log_verdicts_run", "log_verdicts", ["run_id", "id"])
    op.create_table(
        "log_feedback",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Text, sa.ForeignKey("log_runs.id"), nullable=False),
        *(sa.Column(name, sa.Integer) for name in ("turn", "span_start", "span_end")),
        *_texts("kind"),
        sa.Column("value", sa.Double),
        *_nullable_texts("text", "author"),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_index("log_feedback_run", "log_feedback", ["run_id"])


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _nullable_texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text) for name in names]
