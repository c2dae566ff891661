"""The tools there are: those that packages register in `nano.tools`, and those of the user's files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nano_coder.tools.tool import Tool
from nano_shared.errors import ConfigError
from nano_shared.extensions import Extensions, described, is_file_reference


class Tools(Extensions[Tool]):
    """Tools by name. One that lies in a file has a name once it was given as `path.py:name`."""

    def __init__(self) -> None:
        super().__init__("nano.tools", check=_problem)
        self._given: dict[str, tuple[str, Tool]] = {}
        self._made: dict[str, Tool] = {}

    @property
    def files(self) -> tuple[str, ...]:
        """What was given as `path.py:name` in this process, with absolute paths."""
        return tuple(reference for reference, _ in self._given.values())

    def find(self, name: str) -> Tool:
        """The tool of that name. Raises ConfigError for one that is not at hand or cannot be loaded."""
        if name in self._given:
            return self._given[name][1]
        if name in self._made:
            return self._made[name]
        found = super().find(name)
        if not is_file_reference(name) and found.spec.name != name:
            raise ConfigError(f"the tool {found.spec.name!r} is registered in nano.tools as {name!r}")
        return found

    def give(self, reference: str) -> Tool:
        """A tool by its name or `path.py:name`, which from now on has a name in this process.

        Raises ConfigError as `find` does, and where another tool has its name.
        """
        found = self.find(reference)
        if is_file_reference(reference):
            name = found.spec.name
            if name in self and self.find(name) is not found:
                raise ConfigError(f"{reference}: there is another tool called {name!r}; rename the function")
            file, _, attribute = reference.rpartition(":")
            self._given[name] = (f"{os.path.realpath(Path(file).expanduser())}:{attribute}", found)
        return found

    def add(self, made: Tool) -> None:
        """Give a tool that this process made, such as one of an MCP server, its name; replaces an earlier."""
        self._made[made.spec.name] = made

    def source(self, name: str) -> str:
        """Where a tool comes from: a file, the package that registers it, or an MCP server."""
        if name in self._given:
            return self._given[name][0]
        if name in self._made and name.startswith("mcp__"):
            return f"MCP server {name.split('__')[1]}"
        return super().source(name) or "this process"

    def __contains__(self, name: object) -> bool:
        return name in self._given or name in self._made or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._given
        yield from self._made

    def __len__(self) -> int:
        return super().__len__() + len(self._given) + len(self._made)


def _problem(value: object) -> str | None:
    if isinstance(value, Tool):
        return None
    return f"is {described(value)}, and no Tool: put @tool() of nano_coder.tools above the function"


TOOLS = Tools()
