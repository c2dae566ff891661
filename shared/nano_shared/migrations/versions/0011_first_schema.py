"""First schema; a log written here before the first release gets the tables and columns that it lacks.

As the only migration it takes its tables from schema.py. The next one writes them out here first: a migration
never changes when schema.py does.
"""

import sqlalchemy as sa
from alembic import op

from nano_shared.schema import metadata

revision = "0011"
down_revision = None

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
    connection = op.get_bind()
    earlier = sa.inspect(connection).get_table_names()
    metadata.create_all(connection)
    for table in metadata.tables.values():
        there = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
        for column in table.columns:
            if column.name not in there:
                new = sa.Column(
                    column.name, column.type, nullable=column.nullable, server_default=column.server_default
                )
                op.add_column(table.name, new)
    if "log_notes" not in earlier:
        for statement in _SQLITE if connection.dialect.name == "sqlite" else _POSTGRES:
            op.execute(statement)
