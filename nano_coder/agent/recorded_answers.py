"""Recorded answers of a logged run's tools whose results depend on more than the workspace.

A replay takes all of them from the log. A fork takes those of tools that only look outside (a page, a search,
a service behind a URL) where its parent made the same call, so that a group sees one world.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from nano_coder.tools.registry import TOOLS
from nano_coder.tools.tool import Recorded, ToolResult
from nano_shared.hashing import content_hash
from nano_shared.hidden_checks import EnvironmentChecks
from nano_shared.types import Observation, ToolCall, Trajectory

SERVER_TOOL = "mcp__"
"""prefix of the names of MCP servers' tools; a replay needs no server"""


def recorded_kind(name: str, run: Trajectory) -> Recorded:
    """Who takes a tool's answers from the log: replays, forks, or nobody. Tools of an environment: every
    replay."""
    if isinstance(run.task.hidden, EnvironmentChecks) and name in {tool.name for tool in run.given_tools}:
        return "replays"
    if name in TOOLS:
        return TOOLS.find(name).recorded
    return "replays" if name.startswith(SERVER_TOOL) else None


class RecordedAnswers:
    """The answers of one logged run by call; equal calls are answered in their order."""

    def __init__(self, run: Trajectory, get_blob: Callable[[str], bytes], *, for_fork: bool, after: int = 0):
        """`after` turns are those that a fork begins with: their answers are used already."""
        self._get_blob = get_blob
        self._answers: dict[str, deque[Observation]] = defaultdict(deque)
        for turn in run.turns:
            for call, observation in zip(turn.calls, turn.observations, strict=False):
                kind = recorded_kind(call.name, run)
                if turn.index >= after and kind is not None and (kind == "forks" or not for_fork):
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
