"""`nano-coder config`: the configuration and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from nano_coder.config import read_config, why_ignored
from nano_shared.printable import printable


@click.group("config")
def command() -> None:
    """Show the configuration."""


@command.command("show")
@click.option("-C", "directory", type=click.Path(path_type=Path), default=Path(), help="Project directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def show(directory: Path, as_json: bool) -> int:
    """Every setting, its value and its source: flag > environment > nano.toml > user config > default.

    What the project's nano.toml sets and may not is shown as ignored, with the reason.
    """
    found = read_config({}, directory)
    values = found.config.model_dump()
    ignored: dict[str, dict[str, Any]] = {}
    for key, value in found.ignored.items():
        ignored.setdefault(key.split(".")[0], {})[key] = "(set)" if key == "api_key" else value
    if values["api_key"]:
        values["api_key"] = "(set)"
    if as_json:
        rows = {key: {"value": value, "source": found.sources[key]} for key, value in values.items()}
        print(
            json.dumps(
                {k: row | ({"ignored": ignored[k]} if k in ignored else {}) for k, row in rows.items()}
            )
        )
        return 0
    for key, value in values.items():
        shown = printable("-" if value is None else str(value))
        print(f"{key:12} {shown:20} ({found.sources[key]})")
        for name, refused in ignored.get(key, {}).items():
            print(f"{'':12} nano.toml: {name} = {printable(repr(refused))} is ignored")
    if found.ignored and found.project:
        click.echo(printable(f"ignored {why_ignored(found.project)}"), err=True)
    return 0
