"""The tools there are, in packages and files; and recorded answers of those that look outside.

A fork takes the answers of such tools (a page, a search, a service behind a URL) from the log where its
parent made the same call, so that a group sees one world.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from nano_coder.tools.tool import Tool, ToolResult
from nano_shared.errors import ConfigError
from nano_shared.extensions import Extensions, absolute_reference, described, is_reference
from nano_shared.files import content_hash
from nano_shared.types import Observation, ToolCall, Trajectory


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
        if not is_reference(name) and found.spec.name != name:
            raise ConfigError(f"the tool {found.spec.name!r} is registered in nano.tools as {name!r}")
        return found

    def give(self, reference: str) -> Tool:
        """A tool by its name or `path.py:name`, which from now on has a name in this process.

        Raises ConfigError as `find` does, and where another tool has its name.
        """
        found = self.find(reference)
        if is_reference(reference):
            name = found.spec.name
            if name in self and self.find(name) is not found:
                raise ConfigError(f"{reference}: there is another tool called {name!r}; rename the function")
            self._given[name] = (absolute_reference(reference), found)
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


class RecordedAnswers:
    """The answers that forks of a logged run get, by call; equal calls are answered in their order."""

    def __init__(self, run: Trajectory, get_blob: Callable[[str], bytes], after: int):
        """`after` turns are those that a fork begins with: their answers are used already."""
        self._get_blob = get_blob
        self._answers: dict[str, deque[Observation]] = defaultdict(deque)
        for turn in run.turns:
            for call, observation in zip(turn.calls, turn.observations, strict=False):
                if turn.index >= after and call.name in TOOLS and TOOLS.find(call.name).recorded:
                    self._answers[_key(call)].append(observation)

    def take(self, call: ToolCall) -> ToolResult | None:
        """The next answer to the call; None where the log has none."""
        left = self._answers.get(_key(call))
        if not left:
            return None
        observation = left.popleft()
        text = observation.text
        if observation.blob is not None:
            text = self._get_blob(observation.blob).decode()
        return ToolResult(text=text, ok=observation.ok)


def _key(call: ToolCall) -> str:
    return content_hash([call.name, dict(call.arguments)])
