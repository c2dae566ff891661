"""The interface profiles: what a policy sees and how it acts, each frozen under its name.

Never edit one: checkpoints were trained with it, and a test holds its hash. Add a new one.
"""

from __future__ import annotations

from nano_coder.agent.chat_template import CHATML
from nano_coder.tools import TOOLS
from nano_shared.errors import UsageError
from nano_shared.profile import InterfaceProfile, ObservationFormat
from nano_shared.types import Task

_TASK = (
    "{{ prompt }}{% if files %}\nFiles: {{ files | join(' ') }}{% endif %}"
    "{% if check %}\nCheck: {{ check }}{% endif %}"
)

_TOOL_NAMES = ("read_file", "edit_file", "write_file", "search", "shell", "python", "calculate", "submit")

COMPACT_1 = InterfaceProfile(
    name="compact-1",
    dialect="compact",
    tools=tuple(TOOLS[name].spec for name in _TOOL_NAMES),
    system="You are a coding agent. Reply with one action.\n{{ tools }}",
    task=_TASK,
    observation=ObservationFormat(head_tokens=300, tail_tokens=300),
    chat_template=CHATML,
)

HERMES_1 = InterfaceProfile(
    name="hermes-1",
    dialect="hermes",
    tools=tuple(TOOLS[name].spec for name in _TOOL_NAMES),
    system=(
        "You are a coding agent. You work in the current directory through the tools below: look before "
        "you change anything, make the smallest change that does the task, run the check if there is one, "
        "and call submit when you are done. Think briefly, then call a tool.\n\n"
        "# Tools\n\nThe functions, as JSON within <tools></tools>:\n<tools>\n{{ tools }}\n</tools>\n\n"
        "For each call, write a JSON object within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    task=_TASK,
    observation=ObservationFormat(head_tokens=2000, tail_tokens=2000),
    chat_template=None,
)

_MORE_TOOLS = (
    "lookup", "sql", "list_mail", "read_mail", "send_mail", "delete_mail", "list_events", "create_event",
    "move_event", "cancel_event", "find_contact", "save_contact",
)  # fmt: skip


def _extended(profile: InterfaceProfile, name: str) -> InterfaceProfile:
    """The profile with more tools and nothing else changed: what it could serve, it shows as before."""
    more = tuple(TOOLS[tool].spec for tool in _MORE_TOOLS)
    return profile.model_copy(update={"name": name, "tools": (*profile.tools, *more)})


COMPACT_2 = _extended(COMPACT_1, "compact-2")
HERMES_2 = _extended(HERMES_1, "hermes-2")

PROFILES: dict[str, InterfaceProfile] = {
    profile.name: profile for profile in (COMPACT_1, HERMES_1, COMPACT_2, HERMES_2)
}
_SUCCESSORS = {COMPACT_1.name: COMPACT_2, HERMES_1.name: HERMES_2}


def find_profile(name: str) -> InterfaceProfile:
    """The profile of that name. Raises UsageError with the names there are."""
    if name not in PROFILES:
        raise UsageError(f"unknown interface profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]


def serving_profile(profile: InterfaceProfile, task: Task) -> InterfaceProfile:
    """The profile that serves a task: the one given, or the one that adds the tools which the task names.

    A task that neither serves keeps the one given, and `offered_tools` refuses it by the tool.
    """
    named = set(task.tools or ())
    successor = _SUCCESSORS.get(profile.name)
    if named <= {tool.name for tool in profile.tools} or successor is None:
        return profile
    return successor if named <= {tool.name for tool in successor.tools} else profile
