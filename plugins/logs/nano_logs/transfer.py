"""`nano-coder log export` and `import`: runs to and from other formats."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

from typer import Argument, Option

from nano_coder.agent.profiles import logged_opening, logged_tools
from nano_coder.commands.options import (
    DirectoryOption,
    Log,
    PolicyChoice,
    SinceChoice,
    SuccessChoice,
    TaskChoice,
    open_log,
)
from nano_coder.run_formats import RUN_FORMATS, Calls, RunFormat, message_rows
from nano_logs.redact.runs import redacted_runs
from nano_shared.errors import LogError, Refused, UsageError
from nano_shared.extension_points import is_reference, refuse_missing
from nano_shared.files import new_file, new_folder
from nano_shared.logged_run import LoggedRun
from nano_shared.printable import printable
from nano_shared.run_facts import ChosenRuns, moment
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore

WRITTEN = ("jsonl", "messages", "atif", "nemo-gym")
_ELSEWHERE = ("preferences", "tokens")


def export(
    name: Annotated[str, Option("--format", help=f"One of {', '.join(WRITTEN)}.")],
    runs: Annotated[list[str] | None, Argument(metavar="RUN")] = None,
    task: TaskChoice = None,
    since: SinceChoice = None,
    policy: PolicyChoice = None,
    successes: SuccessChoice = False,
    out: Annotated[
        Path | None, Option("-o", "--out", help="New file, or folder; standard output without it.")
    ] = None,
    calls: Annotated[
        Calls,
        Option(help="messages: calls in the assistant's text as they were written, or in `tool_calls`."),
    ] = "text",
    redact: Annotated[bool, Option("--redact", help="Take secrets out first; blobs stay behind.")] = False,
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Write RUNS, or every run that the filters choose, in another format.

    \b
    jsonl     our own: verdicts, feedback and blobs with them; `log import` gives the same log
    messages  OpenAI messages, for SFT
    atif      ATIF v1.8: one run to FILE.json, many to FILE.jsonl or to a folder
    nemo-gym  NeMo Gym rollouts with the token triple

    Preference pairs and rows of tokens: `nano-rl export`.
    """
    if name in _ELSEWHERE:
        raise UsageError(f"--format {name} needs what runs are compared by: nano-rl export --format {name}")
    format = _format(name, _writable)
    if not format.writes:
        raise UsageError(f"the format {name!r} is read, and not written; others are: {_writable()}")
    if calls != "text" and name != "messages":
        raise UsageError("--calls belongs to --format messages")
    choice = ChosenRuns(
        names=tuple(runs or ()), task=task, since=moment(since), policy=policy, successes=successes
    )
    with open_log(log, directory) as store:
        chosen = choice.read(store)
        if redact:
            chosen = redacted_runs(chosen, store.blobs)
        done = _Export(store, chosen, calls=calls, blobs=not redact)
        done.to(format, out)
    done.say()
    return 0


class _Export:
    """One export: the runs that went into it, and why others did not."""

    def __init__(self, store: LogStore, runs: Iterable[LoggedRun], *, calls: Calls, blobs: bool) -> None:
        self.store, self.runs, self.calls, self.blobs = store, runs, calls, blobs
        self.written = 0
        self.refused: Counter[str] = Counter()
        self.missing: set[str] = set()
        self.out: Path | None = None

    def to(self, format: RunFormat, out: Path | None) -> None:
        """Raises UsageError where nothing is left to write, or `out` cannot be."""
        self.out = out
        if format.alone and out is not None and out.suffix not in (".json", ".jsonl"):
            self._file_a_run(format, out)
        elif format.alone and (out is None or out.suffix == ".json"):
            self._one(format, out)
        else:
            with new_file(out) as file:
                self._lines(format, file)
                self._refuse_empty()

    def say(self) -> None:
        for reason, count in self.refused.most_common():
            print(f"left out: {count} runs ({printable(reason)})", file=sys.stderr)
        if self.missing:
            print(f"missing in the log's blobs, so left out: {len(self.missing)} blobs", file=sys.stderr)
        if self.out is not None:
            print(f"{self.written} runs in {self.out}")

    def _lines(self, format: RunFormat, file: TextIO) -> None:
        rows: Iterable[Any] = self._rows(format)
        if format.write_file is not None:
            blobs = self.store.blobs if self.blobs else None
            rows = format.write_file(self._counted(), blobs, self.missing)
        for row in rows:
            file.write(json.dumps(row) + "\n")  # in ASCII, so that it holds any text in any locale

    def _counted(self) -> Iterator[LoggedRun]:
        for run in self.runs:
            self.written += 1
            yield run

    def _rows(self, format: RunFormat) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            try:
                row = self._row(format, run)
            except Refused as problem:
                self.refused[str(problem)] += 1
                continue
            self.written += 1
            yield row

    def _row(self, format: RunFormat, run: LoggedRun) -> dict[str, Any]:
        if run.trajectory.images:
            raise Refused("images", f"{format.name} holds texts, and the run shows images; jsonl holds both")
        first = logged_opening(run.trajectory, self.store.blobs)
        offered = logged_tools(run.trajectory)
        if self.calls == "native":
            return message_rows(run.trajectory, first, calls=self.calls, tools=offered)
        assert format.write_run is not None
        return format.write_run(run, first, offered)

    def _one(self, format: RunFormat, out: Path | None) -> None:
        rows = self._rows(format)
        row = next(rows, None)
        self._refuse_empty()
        if next(rows, None) is not None:
            many = "name a folder or a .jsonl file with -o for many"
            raise UsageError(f"one {format.name} file holds one run: {many}")
        with new_file(out) as file:
            file.write(json.dumps(row) + "\n")

    def _file_a_run(self, format: RunFormat, out: Path) -> None:
        with new_folder(out) as folder:
            for row in self._rows(format):
                (folder / f"{row['trajectory_id']}.json").write_text(json.dumps(row) + "\n")
            self._refuse_empty()

    def _refuse_empty(self) -> None:
        if not self.written:
            why = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            none = "the log holds no run that was asked for; see nano-coder log list"
            raise UsageError(f"none of the runs can be written: {why}" if why else none)


def _writable() -> str:
    added = [name for name in RUN_FORMATS if name not in WRITTEN and RUN_FORMATS.find(name).writes]
    return ", ".join((*WRITTEN, *added))


READ = ("jsonl", "atif", "nemo-gym", "claude-code", "codex")


def import_runs(
    files: Annotated[list[Path], Argument(metavar="FILE")],
    name: Annotated[str, Option("--format", help=f"One of {', '.join(READ)}.")],
    log: Log = None,
) -> int:
    """Add the runs of FILES to the log: all of them, or none where one row is bad.

    \b
    jsonl           what `log export --format jsonl` writes, all but the directory
    atif            ATIF v1.0 to v1.8, a JSON object a file, or one a line in FILE.jsonl
    nemo-gym        NeMo Gym rollouts, one a line
    claude-code     session files
    codex           rollout files

    Runs without token ids and log-probs are text-only: they can be imitated, and train no policy gradient.
    """
    _format(name, _readable)
    # every row is read before the first one is written
    kinds = Counter(run.trajectory.has_tokens for run in runs_of(files, name))
    if not kinds:
        raise UsageError(f"no run in {', '.join(str(file) for file in files)}")
    with open_log(log, create=True) as store:
        try:
            merged = store.merge(lambda: runs_of(files, name, store.blobs))
        except LogError as problem:
            raise LogError(f"nothing was imported: {problem}") from None
    parts = [f"imported {merged.added} runs"]
    parts += [f"{merged.extended} gained verdicts or feedback"] if merged.extended else []
    parts += [f"{merged.known} were in the log already"] if merged.known else []
    parts += [f"{kinds[False]} of the file are text-only"] if kinds[False] else []
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
    added = [name for name in RUN_FORMATS if name not in READ and RUN_FORMATS.find(name).read]
    return ", ".join((*READ, *added))


def _format(name: str, known: Callable[[], str]) -> RunFormat:
    refuse_missing(RUN_FORMATS.group, name)
    if name not in RUN_FORMATS and not is_reference(name):
        raise UsageError(f"there is no format {name!r}; the formats are {known()}, or path.py:name")
    return RUN_FORMATS.find(name)
