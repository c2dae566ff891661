"""Runs keep the tools that they were given beside their profile's, as the model saw them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "log_given_tools",
        sa.Column("hash", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("first_seen", sa.Double, nullable=False),
    )
    op.create_index("log_given_tools_name", "log_given_tools", ["name"])
    op.add_column("log_runs", sa.Column("given_tools", sa.Text))


def downgrade() -> None:
    op.drop_column("log_runs", "given_tools")
    op.drop_table("log_given_tools")
