"""Wraps a log store so that secrets are redacted on write, if the configuration says so."""

from __future__ import annotations

from pathlib import Path

from nano_coder.config import AgentConfig, load_config
from nano_shared.policy import DecodeIds
from nano_shared.redact.redactor import Redactor
from nano_shared.redact.runs import RedactingStore
from nano_shared.store import LogStore


def redacting_store(
    store: LogStore, decode: DecodeIds | None = None, config: AgentConfig | None = None
) -> LogStore:
    """The store, or one that redacts on write if the configuration says so (None: the current one).

    `decode` is needed to mask only the ids that spell a secret; without it all ids of a run with a secret are
    masked. Everything that executes runs writes through this. Raises ConfigError for invalid settings.
    """
    settings = (config or load_config({}, Path())[0]).redact
    return RedactingStore(store, Redactor(settings), decode) if settings.on == "write" else store
