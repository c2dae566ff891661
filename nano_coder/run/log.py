"""A log as its owner wants it written: with what happened, or scrubbed of secrets first."""

from __future__ import annotations

from pathlib import Path

from nano_coder.config import AgentConfig, load_config
from nano_shared.redact import Redactor
from nano_shared.redact.store import RedactingStore
from nano_shared.redact.tokens import Decode
from nano_shared.store import LogStore


def guarded(store: LogStore, decode: Decode | None = None, config: AgentConfig | None = None) -> LogStore:
    """The log, scrubbed on write where the configuration says so (without one: the one that holds here).

    `decode` tells which ids spell a secret; without it all ids of a run that holds one are masked. Whoever
    executes, to serve or to train, writes through this. Raises ConfigError for settings that cannot be read.
    """
    settings = (config or load_config({}, Path())[0]).redact
    return RedactingStore(store, Redactor(settings), decode) if settings.on == "write" else store
