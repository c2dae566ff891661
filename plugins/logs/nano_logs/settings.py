"""The table `[redact]` of a configuration."""

from __future__ import annotations

from typing import Any

from nano_coder.config import SettingsTable
from nano_logs.redact.config import RedactConfig
from nano_shared.policy import DecodeIds
from nano_shared.store import LogStore


def joined(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    return below | above | {"patterns": below["patterns"] | above.get("patterns", {})}


def tightened(below: dict[str, Any], requested: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """More patterns beside the user's, which stay as they are; nothing turned off, nothing allowed."""
    patterns = requested.get("patterns", {}) | below["patterns"]
    on = "write" if "write" in (below["on"], requested.get("on")) else "off"
    kept = below | {"on": on, "patterns": patterns}
    asked = requested.get("patterns", {}).items()
    refused = {f"redact.patterns.{kind}": wanted for kind, wanted in asked if patterns[kind] != wanted}
    if requested.get("on", on) != on:
        refused["redact.on"] = requested["on"]
    if set(requested.get("allow", ())) - set(below["allow"]):
        refused["redact.allow"] = requested["allow"]
    return kept, refused


def redacting_log(settings: RedactConfig, store: LogStore, decode: DecodeIds | None) -> LogStore:
    if settings.on != "write":
        return store
    from nano_logs.redact.redactor import Redactor  # compiles patterns, as does the next
    from nano_logs.redact.runs import RedactingStore

    return RedactingStore(store, Redactor(settings), decode)


def scrubbed(settings: RedactConfig, text: str) -> Any:
    from nano_logs.redact.redactor import Redactor

    return Redactor(settings).scrub(text)


TABLE = SettingsTable(
    model=RedactConfig,
    joined=joined,
    tightened=tightened,
    log=redacting_log,
    note=scrubbed,
)
