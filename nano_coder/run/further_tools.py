"""The tools that runs get beside those of their profile: of files, of packages, and of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nano_coder.config import AgentConfig
from nano_coder.plugin_settings import TABLES
from nano_coder.sandbox.protocol import Sandbox
from nano_coder.tools.registry import TOOLS
from nano_coder.tools.tool import Tool
from nano_shared.extensions import Extensions, call_extension, takes
from nano_shared.store import LogStore

Place = Callable[[], tuple[Sandbox, LogStore]]
"""opens the sandbox of the runs, and their log"""


class RunTools(Protocol):
    """Brings tools that only this process knows, such as those of servers that the configuration names."""

    def __call__(self, config: AgentConfig, place: Place) -> Sequence[Tool]:
        """The tools, with names that no other has. It opens the place only if the configuration asks for
        any. What is left out it says on stderr. Raises ConfigError for what is required and not there."""
        ...


RUN_TOOLS: Extensions[RunTools] = Extensions(
    "nano.run_tools", check=lambda value: takes(value, "config", "place")
)


def further_tools(config: AgentConfig, place: Place) -> list[str]:
    """Names of the further tools. They are then in the registry.

    Raises ConfigError for a tool that is not there, and as `RunTools` do.
    """
    given = [TOOLS.give(tool) for tool in config.tools]
    for name in RUN_TOOLS:
        if name in TABLES and getattr(config, name) == TABLES[name].model():
            continue  # of a plug-in whose settings nobody has set
        brought: Sequence[Tool] = call_extension(
            RUN_TOOLS[name], config, place, name=f"nano.run_tools {name}"
        )
        for tool in brought:
            TOOLS.add(tool)
        given += brought
    return [tool.spec.name for tool in given]
