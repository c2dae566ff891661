"""docs/commands.md: every command of both programs and every setting, from their own help and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main
from pydantic import BaseModel
from tables import of, table

from nano_coder import cli as coder
from nano_coder.config import AgentConfig
from nano_rl import cli as rl
from nano_rl.config import SftConfig, TrainConfig
from nano_shared.command_line import COMMON_PANEL
from nano_shared.settings import section_of, setting_fields

HEAD = """# Commands and settings

Made by `make figures` from the programs' own help and the settings' models, with all plug-ins;
`COMMAND --help` says what each option does, and shows those that many commands share last.
"""


def commands_page() -> str:
    parts = [HEAD]
    for program, cli in (("nano-coder", coder.cli), ("nano-rl", rl.cli)):
        cells = {name: of(f"{{{name}}}") for name in ("command", "purpose", "options")}
        rows = list(_rows(program, typer.main.get_command(cli)))
        parts.append(f"\n## {program}\n\n{table(cells, rows)}\n")
    for title, kind in (
        ("Settings of nano-coder (`nano.toml`, `NANO_NAME`)", AgentConfig),
        ("Settings of `nano-rl train` (`--config`, `--set`)", TrainConfig),
        ("Settings of `nano-rl sft`", SftConfig),
    ):
        parts.append(f"\n## {title}\n\n" + "\n".join(_settings(kind)) + "\n")
    return "".join(parts)


def _rows(path: str, group: Any) -> Iterator[dict[str, str]]:
    for name in sorted(group.targets):
        command, full = group.load(name), f"{path} {name}"
        if hasattr(command, "load"):
            yield from _rows(full, command)
            continue
        shown = [p for p in command.params if not p.hidden and p.rich_help_panel != COMMON_PANEL]
        arguments = [p.metavar or p.name.upper() for p in shown if p.param_type_name == "argument"]
        options = sorted({param.opts[-1] for param in shown if param.param_type_name == "option"})
        yield {
            "command": f"`{' '.join([full, *arguments])}`".replace("|", "\\|"),
            "purpose": _sentence(command.help or ""),
            "options": " ".join(f"`{option}`" for option in options),
        }


def _settings(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in setting_fields(kind):
        default = "" if field.is_required() else f", {field.get_default(call_default_factory=True)!r}"
        if section_of(field) is None:
            yield f"- `{name}`{default}: {_sentence(field.description or '')}"


def _sentence(text: str) -> str:
    """The first paragraph on one line, as a cell of a table."""
    return (
        " ".join(text.split("\n\n")[0].split()).replace("|", "\\|").replace("<", "&lt;").replace("\\[", "[")
    )
