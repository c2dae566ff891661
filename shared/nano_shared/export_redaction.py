"""Secrets out of what is exported: the one place where exports call redaction."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.logged_run import LoggedRun
from nano_shared.types import Value

V = TypeVar("V", bound=Value)


def redacted_runs(runs: Iterable[LoggedRun], blobs: BlobStore) -> Iterator[LoggedRun]:
    """The runs without their secrets, verdicts and feedback too, and with the tokens under one masked.

    Raises UsageError where this version cannot redact.
    """
    scrub_trajectory = _redaction("nano_shared.redact").scrub_trajectory
    for run in runs:
        texts = redacted(run)
        verdict = texts.verdicts[-1] if texts.verdicts else None
        scrubbed = scrub_trajectory(run.trajectory, blobs=blobs).model_copy(update={"verdict": verdict})
        yield texts.model_copy(update={"trajectory": scrubbed})


def redacted(value: V) -> V:
    """A value with every text in it scrubbed. Raises UsageError where this version cannot redact."""
    redact, inner = _redaction("nano_shared.redact"), _redaction("nano_shared.redact.trajectory")
    redactor, known = redact.Redactor(), redact.Known()
    inner.learn(value, redactor, known)  # what is a secret anywhere is hidden everywhere
    scrubbed: V = inner.scrub_value(value, redactor, known)
    return scrubbed


def _redaction(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError("--redact: this version of nano has no redaction; leave the flag out") from None
