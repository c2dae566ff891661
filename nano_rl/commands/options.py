"""Options that several commands share."""

from __future__ import annotations

import click

jobs_option = click.option(
    "--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes that check tasks."
)
