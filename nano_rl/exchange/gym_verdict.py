"""A verdict in NeMo Gym's fields (`nano_shared.gym_verdict`), and what a response answers."""

from __future__ import annotations

from typing import Any

from nano_shared.gym_verdict import FAILURE_KINDS, verified

__all__ = ["FAILURE_KINDS", "last_text", "verified"]


def last_text(response: dict[str, Any]) -> str | None:
    """The text of the last message that the model wrote, as its answer."""
    for item in reversed(response.get("output") or []):
        if not isinstance(item, dict) or item.get("type") != "message":
            continue
        content = item.get("content")
        if isinstance(content, str):
            return content
        parts = [part for part in content or () if isinstance(part, dict)]
        return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "output_text")
    return None
