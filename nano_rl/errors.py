"""Errors of the trainer."""

from __future__ import annotations

from nano_shared.errors import NanoError


class GuardTripped(NanoError):
    """A training that would silently go wrong was stopped; the message says which guard and what to do."""


class RolloutsFailed(NanoError):
    """The rollouts of a step cannot be had from another process; what failed there says how to exit."""

    def __init__(self, message: str, exit_code: int = NanoError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code
