"""Turns of sub-agents name the turn that delegated to them."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("log_turns", sa.Column("delegated_by", sa.Integer))


def downgrade() -> None:
    op.drop_column("log_turns", "delegated_by")
