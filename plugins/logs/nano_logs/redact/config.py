"""The settings of redaction; the patterns are compiled when a text is looked through."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

_NAME = re.compile(r"[a-z0-9][a-z0-9\-]*")
_LARGEST_PATTERN = 2000
"""largest program size of a configured pattern, in instructions"""


class RedactConfig(BaseModel):
    """Secrets: `redact = "write"`, short for the field `on`, keeps them out of the log."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    on: Literal["off", "write"] = "off"
    """write: the log stores redacted text; exports have a flag of their own"""
    patterns: dict[str, str] = {}
    """kind -> regular expression of further secrets; the group `secret`, if any, is what is hidden"""
    allow: tuple[str, ...] = ()
    """regular expressions; a text that one of them matches completely is no secret"""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return {"on": value} if isinstance(value, str) else value

    @field_validator("patterns")
    @classmethod
    def _kinds(cls, value: dict[str, str]) -> dict[str, str]:
        for kind, pattern in value.items():
            if not _NAME.fullmatch(kind):
                raise ValueError(f"{kind!r} is no name of a kind; use lower-case letters, digits and dashes")
            if compiled(pattern).search(""):
                raise ValueError(
                    f"{kind}: {pattern!r} matches the empty text, so everything would be a secret"
                )
        return value

    @field_validator("allow")
    @classmethod
    def _allowed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            compiled(pattern)
        return value


@cache
def compiled(pattern: str) -> Any:
    """Compile a configured pattern, which may be a stranger's, with an engine that never backtracks.

    Raises ValueError for an invalid pattern, and for one that would take long at every character.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        found = re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as problem:
        said = problem.args[0].decode("utf-8", "replace") if isinstance(problem, re2.error) else problem
        raise ValueError(
            f"{pattern!r} is no regular expression ({said}); the syntax is RE2's, which looks neither ahead"
            " nor behind: mark what is secret with (?P<secret>...)"
        ) from None
    if found.programsize > _LARGEST_PATTERN:
        raise ValueError(f"{pattern!r} is too large a regular expression; repeat less in it")
    return found
