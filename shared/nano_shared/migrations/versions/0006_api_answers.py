"""Turns keep what an API returned beside the text: calls, reasoning, usage and cost."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("log_turns", sa.Column("api", sa.Text))


def downgrade() -> None:
    op.drop_column("log_turns", "api")
