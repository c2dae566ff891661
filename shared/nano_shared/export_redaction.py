"""Secrets out of what is exported: the one place where exports call redaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from nano_shared.blobs import BlobStore
from nano_shared.logged_run import LoggedRun
from nano_shared.redact import Known, Redactor, scrub_trajectory
from nano_shared.redact.trajectory import learn, scrub_value
from nano_shared.types import Value

V = TypeVar("V", bound=Value)


def redacted_runs(runs: Iterable[LoggedRun], blobs: BlobStore) -> Iterator[LoggedRun]:
    """The runs without their secrets, verdicts and feedback too, and with the tokens under one masked."""
    for run in runs:
        texts = redacted(run)
        verdict = texts.verdicts[-1] if texts.verdicts else None
        scrubbed = scrub_trajectory(run.trajectory, blobs=blobs).model_copy(update={"verdict": verdict})
        yield texts.model_copy(update={"trajectory": scrubbed})


def redacted(value: V) -> V:
    """A value with every text in it scrubbed."""
    redactor, known = Redactor(), Known()
    learn(value, redactor, known)  # what is a secret anywhere is hidden everywhere
    scrubbed: V = scrub_value(value, redactor, known)
    return scrubbed
