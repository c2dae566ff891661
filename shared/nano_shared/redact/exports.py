"""Exports: selects runs of a log, redacts them, and writes files and folders atomically."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO, TypeVar

from nano_shared.blobs import BlobStore
from nano_shared.durable import durable_folder, full_disk_explained, sync
from nano_shared.errors import UsageError
from nano_shared.logged_run import LoggedRun
from nano_shared.redact.patterns import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.redact.trajectory import learn, scrub_trajectory, scrub_value
from nano_shared.run_facts import RunFilter
from nano_shared.store import LogStore
from nano_shared.types import Trajectory, Value

V = TypeVar("V", bound=Value)


def redacted_runs(runs: Iterable[LoggedRun], blobs: BlobStore) -> Iterator[LoggedRun]:
    """The runs without secrets, also in verdicts and feedback, and with the tokens of secrets masked."""
    for run in runs:
        texts = redacted(run)
        verdict = texts.verdicts[-1] if texts.verdicts else None
        scrubbed = scrub_trajectory(run.trajectory, blobs=blobs).model_copy(update={"verdict": verdict})
        yield texts.model_copy(update={"trajectory": scrubbed})


def redacted(value: V) -> V:
    """A value with every text in it redacted."""
    redactor, known = Redactor(), Known()
    learn(value, redactor, known)  # a secret that is found anywhere is hidden everywhere
    scrubbed: V = scrub_value(value, redactor, known)
    return scrubbed


@contextmanager
def new_file(path: Path | None) -> Iterator[TextIO]:
    """A file that appears if the block ends without an error; None is standard output.

    Raises UsageError if the name is taken or its folder cannot be written.
    """
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with new_binary(path) as temporary:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()


@contextmanager
def new_binary(path: Path) -> Iterator[Path]:
    """A temporary file name beside `path`; renamed to `path` if the block ends without an error."""
    _refuse_unwritable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with full_disk_explained(path, UsageError):
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder; renamed to `path` if the block ends without an error."""
    _refuse_unwritable(path)
    with durable_folder(path, UsageError) as folder:
        yield folder


def _refuse_unwritable(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already; name another with -o")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another with -o")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: {path.parent} is not writable for this user; name another with -o")


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRuns:
    """Selected runs of a log. Raises UsageError if runs are both named and filtered."""

    names: tuple[str, ...] = ()
    """ids, unique prefixes, or "last"; empty: every run that passes the filters"""
    task: str | None = None
    since: float | None = None
    policy: str | None = None
    successes: bool = False

    def __post_init__(self) -> None:
        if self.names and (self.task or self.since is not None or self.policy or self.successes):
            raise UsageError("name runs, or choose them by --task, --since, --policy, --successes: not both")

    def read(self, store: LogStore) -> Iterator[LoggedRun]:
        """The runs in the order given, or oldest first. Raises LogError for an unknown name."""
        named = dict.fromkeys(store.resolve(name) for name in self.names)
        for run_id in named or [run_id for run_id, _ in self.ids(store)]:
            run = store.logged(run_id)
            if not self.successes or succeeded(run.trajectory):
                yield run

    def ids(self, store: LogStore, *, by_task: bool = False) -> list[tuple[str, str]]:
        """Id and task key of the runs that pass the filters, without loading a run; ignores `successes`."""
        chosen = RunFilter(task=self.task, since=self.since, policy=self.policy)
        return store.ids(chosen, by_task=by_task)


def succeeded(run: Trajectory) -> bool:
    """Whether the run ended by itself, with the full reward and without tampering."""
    ended = run.stop is not None and not run.stop.ours
    verdict = run.verdict
    return ended and verdict is not None and (verdict.reward or 0.0) >= 1.0 and not verdict.tampering


def moment(text: str | None, *, now: float | None = None) -> float | None:
    """Unix seconds of a date, a date and time, unix seconds, or so long ago as 90m. Raises UsageError."""
    if text is None:
        return None
    text = text.strip()
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return (time.time() if now is None else now) - float(ago[1]) * _SECONDS[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text!r} is no time; write a date (2026-11-20), a time (2026-11-20T09:30), or so long"
            " ago (90m, 12h, 7d, 2w)"
        ) from None
