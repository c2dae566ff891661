"""Oracle policies: scripted policies that carry out a task's own solution, in the dialect of the profile."""

from __future__ import annotations

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import serving_profile
from nano_coder.agent.prompt import offered_tools
from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.errors import UsageError
from nano_shared.profile import InterfaceProfile
from nano_shared.types import Task

ORACLE = "oracle"


def oracle_policy(task: Task, profile: InterfaceProfile) -> ScriptedPolicy:
    """A policy that takes the actions of the task's oracle, one per turn. Raises UsageError without one."""
    if not task.oracle:
        raise UsageError(f"task {task.key!r} has no oracle, so it cannot serve a warm start")
    profile = serving_profile(profile, task)
    dialect, tools = DIALECTS[profile.dialect], offered_tools(profile, task)
    return ScriptedPolicy(
        [dialect.render(action.thought, (action,), tools) for action in task.oracle], id=ORACLE
    )
