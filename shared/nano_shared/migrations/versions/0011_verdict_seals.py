"""Verdicts are hashed together with what they judged."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("log_verdicts", sa.Column("seal", sa.Text))


def downgrade() -> None:
    op.drop_column("log_verdicts", "seal")
