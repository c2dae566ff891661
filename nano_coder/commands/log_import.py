"""`nano-coder log import`: other programs' runs into the log, all of them or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from nano_coder.formats import atif, claude_code, codex, mini_swe_agent, nemo_gym
from nano_coder.formats import native as whole
from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError, UsageError
from nano_shared.logged_run import LoggedRun
from nano_shared.printable import printable
from nano_shared.refusal import Refused
from nano_shared.store import LogStore
from nano_shared.strict_json import Row, at_place, decoded, json_lines, json_object

FORMATS = ("jsonl", "atif", "nemo-gym", "mini-swe-agent", "claude-code", "codex")


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "name", required=True, help=f"One of {', '.join(FORMATS)}.")
@click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
def command(files: tuple[Path, ...], name: str, log: str | None) -> int:
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
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; the formats are {', '.join(FORMATS)}")
    read = 0
    text_only = 0
    for run in runs_of(files, name):  # every row is read before the first one is written
        read += 1
        text_only += not run.trajectory.has_tokens
    if not read:
        raise UsageError(f"no run in {', '.join(str(file) for file in files)}")
    with LogStore.open(log) as store:
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


def runs_of(files: tuple[Path, ...], name: str, blobs: BlobStore | None = None) -> Iterator[LoggedRun]:
    """The runs of the files, one in memory at a time. Raises UsageError with file, line and field."""
    for file in files:
        try:
            yield from _runs(file, name, blobs)
        except Refused as problem:
            raise UsageError(printable(f"nothing was imported: {problem}")) from None


def _runs(file: Path, name: str, blobs: BlobStore | None) -> Iterator[LoggedRun]:
    if name == "jsonl":
        for _, run in whole.read(file, blobs):
            yield run
    elif name == "claude-code":
        yield claude_code.read(str(file), json_lines(file))
    elif name == "codex":
        yield codex.read(str(file), json_lines(file))
    elif name == "mini-swe-agent":
        with at_place(str(file)):
            yield mini_swe_agent.read(_object(file))
    else:
        reader = atif.read if name == "atif" else nemo_gym.read
        rows = json_lines(file) if name == "nemo-gym" or file.suffix == ".jsonl" else _single(file)
        for where, row in rows:
            with at_place(where):
                found = list(reader(row))
            yield from found


def _single(file: Path) -> Iterator[tuple[str, Row]]:
    yield str(file), _object(file)


def _object(file: Path) -> Row:
    with at_place(str(file)):
        try:
            return json_object(decoded(file.read_bytes()))
        except OSError as problem:
            raise Refused("file", f"cannot be read: {problem.strerror}") from None
