"""Whose run it is: its owner and its project, and which runs a user sees and may learn from.

A run without an owner is of an older version, or of nobody who said so: it counts as everybody's own.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sqlalchemy as sa

from nano_shared.files import content_hash
from nano_shared.types import Share

EVERYBODY = "all"
"""in place of an owner: the runs of all"""
_SECONDS = 5
"""for git to find a first commit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Who uses a log."""

    name: str
    """as runs name their owner"""
    share: Share = Share.TEAM
    """consent of the runs that the user makes"""
    directory: str = ""
    """absolute path of the directory whose newest run is `last`"""

    def owns(self, owner: str | None) -> bool:
        return owner in (None, self.name)

    def may_learn(self, owner: str | None, share: str | None) -> bool:
        """Whether what the user trains may learn from a run: the user's own, or one that its owner gave."""
        return self.owns(owner) or share == Share.TRAIN

    def sees(self, columns: sa.ColumnCollection[str, sa.ColumnElement[str]]) -> sa.ColumnElement[bool]:
        """SQL: whether the user is shown a run; `columns` hold its `owner` and `share`."""
        return sa.or_(self.made(columns), columns["share"].is_distinct_from(Share.NEVER.value))

    def made(self, columns: sa.ColumnCollection[str, sa.ColumnElement[str]]) -> sa.ColumnElement[bool]:
        """SQL: whether a run is the user's own."""
        return sa.or_(columns["owner"].is_(None), columns["owner"] == self.name)


@cache
def project_of(directory: str) -> str:
    """Identity of a user's directory, which a moved one and a clone keep: the first commit of its history,
    and the way from the root of the work tree to it.

    Without a history, or with a shallow one, whose first commit is another later, the directory.
    """
    shallow, _, inside = _git(directory, "rev-parse", "--is-shallow-repository", "--show-prefix").partition(
        "\n"
    )
    first = _git(directory, "rev-list", "--first-parent", "--max-parents=0", "HEAD")
    return f"git:{first}/{inside}".rstrip("/") if first and shallow == "false" else directory


def project_id(directory: Path) -> str:
    """The project of a directory as the name of a file."""
    return content_hash(project_of(str(directory.resolve()))).removeprefix("sha256:")[:16]


def _git(directory: str, *arguments: str) -> str:
    """What git prints; empty where it fails. It starts no program and reaches no network that the repository
    names."""
    env = {
        "PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "", "GIT_TERMINAL_PROMPT": "0",
    }  # fmt: skip
    command = ("git", "-c", "core.fsmonitor=false", "-C", directory, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, env=env, timeout=_SECONDS, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else ""
