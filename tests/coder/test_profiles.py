"""A profile is frozen under its name, since checkpoints were trained with it.

If a test here fails, do not edit its literals: give the changed prompt, tool or observation format a new
profile under a new name, and leave the old one as it was.
"""

from __future__ import annotations

import pytest

from nano_coder.agent.profiles import (
    COMPACT_1,
    HERMES_1,
    PROFILES,
    find_profile,
    first_messages,
    serving_profile,
)
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.policy import InterfaceProfile
from nano_shared.types import Task

FROZEN = {
    "api-1": (
        "sha256:64d9ad05a90b6080290e90ccb0e679a25dd557518ec094c89e11a4c49b2e9b7e",
        "sha256:af3fd94cb526b6d2b0a45aa445fd238b3de18a10d7172b86fb2a6dd4f67443ef",
    ),
    "compact-1": (
        "sha256:f7098c6c669ab6b3279d681f91fd6a1be13860bfd4099eb83532576880d2089d",
        "sha256:af3fd94cb526b6d2b0a45aa445fd238b3de18a10d7172b86fb2a6dd4f67443ef",
    ),
    "hermes-1": (
        "sha256:a8d5bbeaf1cb2d02d5d6b7d37778c9ae89b3d18a542455824876f3585cf5c208",
        "sha256:af3fd94cb526b6d2b0a45aa445fd238b3de18a10d7172b86fb2a6dd4f67443ef",
    ),
    "compact-3": (
        "sha256:51054d0c748a6ff045b12704d53a8a833a965ca806ee201546d60959c2dfbba8",
        "sha256:73238b676384287de2780f22ad85f9ceb8f37a85cb6c607b5618347917e10f4f",
    ),
    "repair-1": (
        "sha256:93f94143cd8acdea87eec4bca0401e637953a836fb338f5cde26872726388880",
        "sha256:16e83bbb6e9dac43a9e5dd21b3185fd7f1b8c0e26a1be22e2d48ccc2aaa938ec",
    ),
}
TASK = "Fix it.\nFiles: a.py b.py\nCheck: pytest -q"
COMPACT_SYSTEM = """\
You are a coding agent. Reply with one action.
@read_file path= start= end=
@edit_file path= line= old= then new below
@write_file path= then content below
@search pattern= path=
@shell then command below
@python then code below
@calculate then expression below
@submit then answer below"""
HERMES_SYSTEM = "sha256:31fac720db7af1e08d5c0d455c61b73100c823d440932b7b57d09c563cd8f280"


def messages(name: str) -> list[str]:
    task = Task(key="t", prompt="Fix it.", check="pytest -q")
    return [m.content for m in first_messages(PROFILES[name], task, ["b.py", "a.py", ".env"])]


def test_every_profile_is_what_it_was_when_it_was_named() -> None:
    assert {name: (p.hash, p.tools_hash) for name, p in PROFILES.items()} == FROZEN


def test_the_first_messages_are_what_they_were() -> None:
    assert messages(COMPACT_1.name) == [COMPACT_SYSTEM, TASK]
    system, task = messages(HERMES_1.name)
    assert (content_hash(system), task) == (HERMES_SYSTEM, TASK)
    assert system.endswith('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="profile 'compact-0'; known: api-1, compact-1, compact-3, hermes-1"):
        find_profile("compact-0")


@pytest.mark.parametrize("profile", [COMPACT_1, HERMES_1])
def test_a_task_that_names_a_further_tool_adds_it_and_shows_the_rest_alike(profile: InterfaceProfile) -> None:
    old = Task(key="t", prompt="Fix it.", tools=("shell", "submit"))
    new = Task(key="t", prompt="Ask.", tools=("sql", "submit"))
    assert serving_profile(profile, old) is profile
    wider = serving_profile(profile, new)
    assert wider == find_profile(f"{profile.name}+sql")
    assert serving_profile(profile, Task(key="t", prompt="All of them.")) is profile
    assert serving_profile(profile, Task(key="t", prompt="None has it.", tools=("fly",))) is profile
    assert first_messages(profile, old, ["a.py"]) == first_messages(wider, old, ["a.py"])
