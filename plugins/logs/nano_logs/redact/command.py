"""`nano-coder log redact`: takes the secrets out of logged runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from nano_coder.commands.options import DirectoryOption, Log
from nano_coder.config import load_config, open_store, settings_of
from nano_logs.redact.config import RedactConfig
from nano_logs.redact.redactor import Redactor
from nano_logs.redact.runs import redact_run


def command(
    runs: Annotated[list[str], Argument(metavar="RUN...")],
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Take the secrets out of RUNS for good: what they held before is dropped, not kept beside it.

    The rules are those of `redact` in nano.toml. All token ids of a run that held a secret become
    placeholders: it trains no policy gradient any more. Snapshots of workspaces stay as they are.
    """
    config, _ = load_config({"log": log}, directory)
    redactor = Redactor(settings_of(config, "redact", RedactConfig))
    with open_store(config, directory, create=False) as store:
        for run in runs:
            changed = redact_run(store, store.resolve(run), redactor)
            print(f"run {store.resolve(run)}: {'redacted' if changed else 'nothing to redact'}")
    return 0
