"""Requests of the server's clients: their session, their name, and the conversation that they left."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "log_requests",
        sa.Column("run_id", sa.Text, sa.ForeignKey("log_runs.id"), primary_key=True),
        sa.Column("turn", sa.Integer, primary_key=True),
        sa.Column("session", sa.Text, nullable=False),
        sa.Column("client", sa.Text, nullable=False),
        sa.Column("conversation", sa.Text, nullable=False),
    )
    op.create_index("log_requests_session", "log_requests", ["session"])
    op.create_index("log_requests_conversation", "log_requests", ["conversation"])


def downgrade() -> None:
    op.drop_table("log_requests")
