"""`nano-coder trust`: let a project's nano.toml, .mcp.json and AGENTS.md do more than they may unasked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from nano_coder.commands.display import on_terminal
from nano_coder.config import configured, parse_toml, project_tables, typed_layer
from nano_coder.plugin_settings import TABLES, SettingsTable
from nano_coder.trust import (
    PROJECT_FILE,
    ProjectFile,
    is_trusted,
    project_files,
    read_project_file,
    revoke,
    trust,
    trusted_files,
)
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.printable import printable


def command(
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
