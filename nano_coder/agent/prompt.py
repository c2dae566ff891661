"""Prompts: the first messages of a run, system and task, rendered from the profile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_shared.errors import UsageError
from nano_shared.extensions import refuse_missing
from nano_shared.policy import Conversation, InterfaceProfile
from nano_shared.types import Message, Role, Task, ToolSpec, Trajectory, Turn

_MAX_FILES = 30
DELEGATE = "delegate"
"""the tool that starts a sub-agent"""
_environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


def offered_tools(profile: InterfaceProfile, task: Task) -> tuple[ToolSpec, ...]:
    """The profile's tools that the task allows. Raises UsageError for a tool that the profile does not
    have."""
    if task.tools is None:
        return profile.tools
    known = {tool.name: tool for tool in profile.tools}
    if missing := [name for name in task.tools if name not in known]:
        refuse_missing("nano.tools", missing[0])
        raise UsageError(
            f"task {task.key!r} allows {missing[0]!r}, which profile {profile.name} does not have; "
            f"it has {', '.join(known)}"
        )
    return tuple(tool for tool in profile.tools if tool.name in task.tools)


def without_delegate(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """The tools of a sub-agent, which has none of its own."""
    return tuple(tool for tool in tools if tool.name != DELEGATE)


def delegating(turns: Sequence[Turn]) -> int | None:
    """Index of the last of an agent's turns if its call waits for a sub-agent; else None."""
    last = turns[-1] if turns else None
    waits = last is not None and len(last.observations) < len(last.calls) and last.calls[-1].name == DELEGATE
    return last.index if last is not None and waits else None


def first_messages(profile: InterfaceProfile, task: Task, files: Sequence[str]) -> tuple[Message, ...]:
    """The system message and the task message; `files` are the workspace's paths. A task without any tool is
    its own prompt, with no system message."""
    tools = offered_tools(profile, task)
    prompt = rendered(
        profile.task,
        prompt=task.prompt, files=_listing(files), check=task.check, instructions=task.instructions,
    )  # fmt: skip
    asked = Message(role=Role.USER, content=prompt)
    return (Message(role=Role.SYSTEM, content=system_text(profile, tools)), asked) if tools else (asked,)


def open_conversation(
    profile: InterfaceProfile, task: Task, files: Sequence[str], started: float | None = None
) -> Conversation:
    """A conversation before its first turn. `started` is the run's start in unix seconds, whose date a chat
    template may write; under a profile whose system message shows no tools the chat template gets them."""
    by_template = profile.chat_template is None and "{{ tools }}" not in profile.system
    tools = offered_tools(profile, task) if by_template else ()
    return Conversation(first_messages(profile, task, files), tools=tools, started=started)


def first_started(run: Trajectory) -> float:
    """Start of the run in whose tokens a conversation begins, unix seconds; of a fork, its parent's."""
    return min([run.started, *(turn.started for turn in run.turns[:1])])


def system_text(profile: InterfaceProfile, tools: Sequence[ToolSpec]) -> str:
    """The system message of a profile, with these tools as its dialect describes them."""
    described = DIALECTS.find(profile.dialect).describe(tools)
    return _environment.from_string(profile.system).render(tools=described)


def rendered(template: str, **variables: Any) -> str:
    """A template of a profile with these variables; half a surrogate pair, which no tokenizer accepts, is
    escaped."""
    text: str = _environment.from_string(template).render(**variables)
    return text.encode("utf-8", "backslashreplace").decode()


def _listing(files: Sequence[str]) -> list[str]:
    # bytes that are not UTF-8 are shown as the tools show them
    names = (os.fsencode(file).decode("utf-8", "backslashreplace") for file in files)
    shown = sorted(name for name in names if not name.startswith("."))
    if len(shown) <= _MAX_FILES:
        return shown
    return [*shown[:_MAX_FILES], f"and {len(shown) - _MAX_FILES} more"]
