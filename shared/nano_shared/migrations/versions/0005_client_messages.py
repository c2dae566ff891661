"""Turns of served conversations hold the messages that the client sent."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("log_turns", sa.Column("messages", sa.Text))


def downgrade() -> None:
    op.drop_column("log_turns", "messages")
