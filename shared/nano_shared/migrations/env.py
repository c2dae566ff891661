"""Alembic's environment: runs migrations on the connection and in the transaction of database.py."""

from alembic import context

from nano_shared.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
