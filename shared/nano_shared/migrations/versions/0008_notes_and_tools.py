"""Notes of an agent on a project, with full-text search, and the tools that runs were given."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_SQLITE = (
    "CREATE VIRTUAL TABLE log_notes_text USING fts5(text, content='log_notes', content_rowid='id')",
    "CREATE TRIGGER log_notes_added AFTER INSERT ON log_notes BEGIN"
    " INSERT INTO log_notes_text(rowid, text) VALUES (new.id, new.text); END",
    "CREATE TRIGGER log_notes_deleted AFTER DELETE ON log_notes BEGIN"
    " INSERT INTO log_notes_text(log_notes_text, rowid, text) VALUES ('delete', old.id, old.text); END",
    "CREATE TRIGGER log_notes_edited AFTER UPDATE ON log_notes BEGIN"
    " INSERT INTO log_notes_text(log_notes_text, rowid, text) VALUES ('delete', old.id, old.text);"
    " INSERT INTO log_notes_text(rowid, text) VALUES (new.id, new.text); END",
)
_POSTGRES = (
    "ALTER TABLE log_notes ADD COLUMN words tsvector"
    " GENERATED ALWAYS AS (to_tsvector('simple', text)) STORED",
    "CREATE INDEX log_notes_words ON log_notes USING gin (words)",
)


def upgrade() -> None:
    op.create_table(
        "log_notes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("private", sa.Boolean, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_index("log_notes_project", "log_notes", ["project"])
    op.create_table(
        "log_given_tools",
        sa.Column("hash", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("first_seen", sa.Double, nullable=False),
    )
    op.create_index("log_given_tools_name", "log_given_tools", ["name"])
    op.add_column("log_runs", sa.Column("given_tools", sa.Text))
    for statement in _SQLITE if op.get_bind().dialect.name == "sqlite" else _POSTGRES:
        op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TABLE log_notes_text")
    op.drop_table("log_notes")
    op.drop_column("log_runs", "given_tools")
    op.drop_table("log_given_tools")
