"""Runs name the directory that their workspace was copied from."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("log_runs", sa.Column("directory", sa.Text))


def downgrade() -> None:
    op.drop_column("log_runs", "directory")
