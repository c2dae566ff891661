"""`nano-coder config`: the configuration and where each value came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nano_coder.agent.instructions import find_instructions
from nano_coder.config import read_config, user_config_path, why_ignored
from nano_shared.command_line import JsonOption, lazy_app
from nano_shared.printable import printable, without_password

command = lazy_app(
    "config",
    {"show": (f"{__name__}:show", "Every setting, its value and its source.")},
    help="Show the configuration.",
)


def show(
    directory: Annotated[Path, Option("-C", metavar="DIR", help="Project directory.")] = Path(),
    as_json: JsonOption = False,
) -> int:
    """Every setting, its value and its source: flag > environment > nano.toml > user config > default.

    What the project's nano.toml sets and may not is shown as ignored, with the reason. Below stand the files
    that instruct a run in DIR (AGENTS.md), outermost first.
    """
    found = read_config({}, directory)
    values = found.config.model_dump()
    ignored: dict[str, dict[str, Any]] = {}
    for key, value in found.ignored.items():
        ignored.setdefault(key.split(".")[0], {})[key] = "(set)" if key == "api_key" else value
    if values["log"]:
        values["log"] = without_password(values["log"])
    if values["api_key"]:
        values["api_key"] = "(set)"
    for server in values["mcp"]["servers"].values():
        server |= {"env": dict.fromkeys(server["env"], "(set)")} if "env" in server else {}
    user = user_config_path().parent
    chain = find_instructions(directory, found.config.instructions, user, found.config.exclude)
    if as_json:
        rows = {key: {"value": value, "source": found.sources[key]} for key, value in values.items()}
        rows["instructions"]["chain"] = [file.model_dump() for file in chain]
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
    for file in chain:
        how = "trusted" if file.trusted else "not trusted: shown as a stranger's data"
        print(f"{printable(file.path)}: {len(file.text.encode())} bytes of instructions, {how}")
    if found.ignored and found.project:
        print(printable(f"ignored {why_ignored(found.project)}"), file=sys.stderr)
    return 0
