"""Errors of the trainer."""

from __future__ import annotations

from nano_shared.errors import NanoError


class GuardTripped(NanoError):
    """A training that would silently go wrong was stopped; the message says which guard and what to do."""
