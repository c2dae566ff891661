"""`nano-coder models`: the models that are at hand."""

from __future__ import annotations

import click

from nano_coder.models.opening import known_models


@click.command("models")
def command() -> int:
    """Each name that --model takes on this machine, and what it is."""
    for name, what in known_models():
        print(f"{name:32} {what}")
    return 0
