"""The second profiles: the first ones with the tools of the generated domains, SQL to office work.

Each is frozen under its name, as `nano_coder/agent/profiles.py` says; a test holds its hash.
"""

from __future__ import annotations

from nano_coder.agent.profiles import COMPACT_1, HERMES_1
from nano_coder.tools.tool import TOOLS
from nano_shared.policy import InterfaceProfile

_MORE_TOOLS = (
    "lookup", "sql", "list_mail", "read_mail", "send_mail", "delete_mail", "list_events", "create_event",
    "move_event", "cancel_event", "find_contact", "save_contact",
)  # fmt: skip


def _extended(profile: InterfaceProfile, name: str) -> InterfaceProfile:
    """The profile with more tools and nothing else changed: what it could serve, it shows as before."""
    more = tuple(TOOLS.find(tool).spec for tool in _MORE_TOOLS)
    return profile.model_copy(update={"name": name, "tools": (*profile.tools, *more)})


COMPACT_2 = _extended(COMPACT_1, "compact-2")
HERMES_2 = _extended(HERMES_1, "hermes-2")
