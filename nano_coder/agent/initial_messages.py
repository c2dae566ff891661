"""The initial messages of a logged run: system message, task message and tools."""

from __future__ import annotations

from typing import Any

from nano_coder.agent.dialects.dialect import function_schema
from nano_coder.agent.profiles import logged_profile, serving_profile
from nano_coder.agent.prompt import first_messages, offered_tools
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.policy import InterfaceProfile
from nano_shared.types import Message, Role, Task, Trajectory

ORIGINAL_OPENING = "opening"
"""where an imported run keeps its first messages, in `task.provenance.original`"""
ORIGINAL_TOOLS = "tools"


def opening(run: Trajectory, blobs: BlobStore) -> tuple[Message, ...] | None:
    """The messages before the first completion; None if they cannot be reconstructed."""
    if run.turns and run.turns[0].messages:
        return run.turns[0].messages
    original = run.task.provenance.original or {}
    if isinstance(kept := original.get(ORIGINAL_OPENING), list):
        return tuple(Message.model_validate(message) for message in kept)
    profile = profile_of(run)
    if profile is None:
        return None
    try:
        return first_messages(profile, run.task, shown_files(run, blobs))
    except UsageError:  # the snapshot is not at hand, or the task names a tool that the profile lost
        return None


def tools(run: Trajectory) -> list[dict[str, Any]] | None:
    """The tools as OpenAI's function schema; None where they are not known."""
    original = run.task.provenance.original or {}
    if isinstance(kept := original.get(ORIGINAL_TOOLS), list):
        return [tool for tool in kept if isinstance(tool, dict)]
    profile = profile_of(run)
    try:
        return [function_schema(tool) for tool in offered_tools(profile, run.task)] if profile else None
    except UsageError:
        return None


def profile_of(run: Trajectory) -> InterfaceProfile | None:
    """The profile of the run; None if this version does not have it unchanged."""
    profile = logged_profile(run)
    if profile is None:
        return None
    profile = serving_profile(profile, run.task)
    return profile if profile.hash == run.profile_hash else None


def plain_opening(task: Task) -> tuple[Message, ...]:
    """The prompt as the only message, for a run whose first messages are unknown."""
    return (Message(role=Role.USER, content=task.prompt),)


def shown_files(run: Trajectory, blobs: BlobStore) -> list[str]:
    """The workspace's paths as the task message lists them: the task's own, or those of the directory that
    the run began in. Raises LogError where the task's snapshot is damaged or not among `blobs`."""
    if run.task.snapshot is None:
        return sorted(run.task.files)
    return snapshot.load(run.task.snapshot, blobs).shown_files
