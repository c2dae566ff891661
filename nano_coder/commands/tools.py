"""`nano-coder tools`: what a run would offer its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nano_coder.commands.options import ToolOption, agent_options, configured
from nano_coder.config import AgentConfig
from nano_shared.command_line import JsonOption
from nano_shared.printable import printable
from nano_shared.settings_options import Settings


@agent_options("model", "profile")
def command(
    settings: Settings[AgentConfig],
    directory: Annotated[Path, Option("-C", metavar="DIR", help="Where the work is.")] = Path(),
    as_json: JsonOption = False,
    tools: ToolOption = None,
) -> int:
    """The tools that a run in DIR would offer: description, arguments, and where each comes from.

    MCP servers of the configuration are started for it. --json prints the schemas as the model gets them.
    """
    from nano_coder.agent.profiles import days_profile, find_profile, with_tools
    from nano_coder.mcp.tools import further_tools
    from nano_coder.models.opening import usual_profile
    from nano_coder.sandbox.backend import open_sandbox
    from nano_coder.tools.registry import TOOLS
    from nano_shared.store import LogStore

    config, _ = configured(settings, directory, tools=tools)
    if config.mcp.servers:  # they are started: only they know their tools
        more = further_tools(
            config, open_sandbox(config.sandbox, image=config.image), LogStore.open(config.log)
        )
    else:
        more = [TOOLS.give(tool).spec.name for tool in config.tools]
    usual = find_profile(config.profile or usual_profile(config.model))
    profile = with_tools(usual if config.profile else days_profile(usual), more)
    rows = [
        {**spec.model_dump(exclude={"body"}), "source": TOOLS.source(spec.name)} for spec in profile.tools
    ]
    if as_json:
        print(json.dumps({"profile": profile.name, "tools_hash": profile.tools_hash, "tools": rows}))
        return 0
    print(f"profile {printable(profile.name)} offers {len(rows)} tools")
    for row in rows:
        print(f"\n{_signature(row)}  ({printable(row['source'])})\n    {printable(row['description'])}")
    return 0


def _signature(row: dict[str, Any]) -> str:
    properties, required = row["parameters"]["properties"], row["parameters"].get("required", [])
    given = ", ".join(name if name in required else f"{name}?" for name in properties)
    return printable(f"{row['name']}({given})")
