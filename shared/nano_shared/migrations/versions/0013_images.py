"""The images that an observation shows."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    # the first migration takes its columns from schema.py, this one among them
    there = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("log_tool_calls")}
    if "images" not in there:
        op.add_column("log_tool_calls", sa.Column("images", sa.Text))
