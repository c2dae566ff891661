"""`nano-coder log import`: other programs' runs into the log, all of them or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.options import Log, open_log
from nano_coder.formats.run_format import RUN_FORMATS
from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError, UsageError
from nano_shared.extensions import is_file_reference
from nano_shared.logged_run import LoggedRun
from nano_shared.printable import printable
from nano_shared.refusal import Refused

FORMATS = ("jsonl", "atif", "nemo-gym", "mini-swe-agent", "claude-code", "codex")


def command(
    files: Annotated[list[Path], Argument(metavar="FILE")],
    name: Annotated[str, Option("--format", help=f"One of {', '.join(FORMATS)}.")],
    log: Log = None,
) -> int:
    """Add the runs of FILES to the log: all of them, or none where one row is bad.

    \b
    jsonl           what `log export --format jsonl` writes, all but the directory
    atif            ATIF v1.0 to v1.8, a JSON object a file, or one a line in FILE.jsonl
    nemo-gym        NeMo Gym rollouts, one a line
    mini-swe-agent  trajectory files
    claude-code     session files
    codex           rollout files

    Runs without token ids and log-probs are text-only: they can be imitated, and train no policy gradient.
    """
    if name not in RUN_FORMATS and not is_file_reference(name):
        raise UsageError(f"there is no format {name!r}; the formats are {_readable()}, or path.py:name")
    read = 0
    text_only = 0
    for run in runs_of(files, name):  # every row is read before the first one is written
        read += 1
        text_only += not run.trajectory.has_tokens
    if not read:
        raise UsageError(f"no run in {', '.join(str(file) for file in files)}")
    with open_log(log, create=True) as store:
        try:
            merged = store.merge(lambda: runs_of(files, name, store.blobs))
        except LogError as problem:
            raise LogError(f"nothing was imported: {problem}") from None
    parts = [f"imported {merged.added} runs"]
    parts += [f"{merged.extended} gained verdicts or feedback"] if merged.extended else []
    parts += [f"{merged.known} were in the log already"] if merged.known else []
    parts += [f"{text_only} of the file are text-only"] if text_only else []
    print("; ".join(parts))
    return 0


def runs_of(files: Sequence[Path], name: str, blobs: BlobStore | None = None) -> Iterator[LoggedRun]:
    """The runs of the files, one in memory at a time. Raises UsageError with file, line and field."""
    read = RUN_FORMATS.find(name).read
    if read is None:
        raise UsageError(f"the format {name!r} is written, and not read; others are: {_readable()}")
    for file in files:
        try:
            yield from read(file, blobs)
        except Refused as problem:
            raise UsageError(printable(f"nothing was imported: {problem}")) from None


def _readable() -> str:
    added = [name for name in RUN_FORMATS if name not in FORMATS and RUN_FORMATS.find(name).read]
    return ", ".join((*FORMATS, *added))
