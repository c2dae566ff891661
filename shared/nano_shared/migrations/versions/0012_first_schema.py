"""First schema; a log written here before the first release gets the tables and columns that it lacks.

As the only migration it takes its tables and their indexes from schema.py. The next one writes them out here
first: a migration never changes when schema.py does.
"""

import sqlalchemy as sa
from alembic import op

from nano_shared.schema import NOTES_INDEX, metadata

revision = "0012"
down_revision = None


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
        for index in table.indexes:
            index.create(connection, checkfirst=True)
    if "log_notes" not in earlier:
        for statement in NOTES_INDEX[connection.dialect.name]:
            op.execute(statement)
