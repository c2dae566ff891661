"""The interface profiles: what a policy sees and how it acts, each frozen under its name.

Never edit one: checkpoints were trained with it, and a test holds its hash. Add a new one.
"""

from __future__ import annotations

from nano_coder.chat_template import CHATML
from nano_coder.tools import TOOLS
from nano_shared.errors import UsageError
from nano_shared.profile import InterfaceProfile, ObservationFormat

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

PROFILES: dict[str, InterfaceProfile] = {profile.name: profile for profile in (COMPACT_1, HERMES_1)}


def find_profile(name: str) -> InterfaceProfile:
    """The profile of that name. Raises UsageError with the names there are."""
    if name not in PROFILES:
        raise UsageError(f"unknown interface profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]
