"""Sessions of clients belong to the key that began them."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("log_requests", sa.Column("owner", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("log_requests", "owner")
