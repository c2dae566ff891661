"""Forks name the step of their parent that they went on from."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("log_runs", sa.Column("parent_step", sa.Integer))


def downgrade() -> None:
    op.drop_column("log_runs", "parent_step")
