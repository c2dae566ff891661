"""Verdicts keep how a check by command ended, and the end of what it printed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("log_verdicts", sa.Column("check_run", sa.Text))


def downgrade() -> None:
    op.drop_column("log_verdicts", "check_run")
