"""`nano-coder config`: the configuration and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path

import click

from nano_coder.config import load_config


@click.group("config")
def command() -> None:
    """Show the configuration."""


@command.command("show")
@click.option("-C", "directory", type=click.Path(path_type=Path), default=Path(), help="Project directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def show(directory: Path, as_json: bool) -> int:
    """Every setting, its value and its source: flag > environment > nano.toml > user config > default."""
    config, sources = load_config({}, directory)
    values = config.model_dump()
    if values["api_key"]:
        values["api_key"] = "(set)"
    if as_json:
        print(json.dumps({key: {"value": value, "source": sources[key]} for key, value in values.items()}))
        return 0
    for key, value in values.items():
        print(f"{key:12} {value if value is not None else '-'!s:20} ({sources[key]})")
    return 0
