"""`nano-coder log export`: runs of the log in a format that other programs take."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from nano_coder.formats import atif, messages, nemo_gym
from nano_coder.formats import native as whole
from nano_coder.formats.harbor_job import HarborJob
from nano_coder.formats.initial_messages import opening, tools
from nano_shared.errors import UsageError
from nano_shared.logged_run import LoggedRun
from nano_shared.printable import printable
from nano_shared.redact.exports import ChosenRuns, choice_options, moment, new_file, new_folder, redacted_runs
from nano_shared.refusal import Refused
from nano_shared.store import LogStore

FORMATS = ("jsonl", "messages", "atif", "nemo-gym", "harbor")
_ELSEWHERE = ("preferences", "tokens")


@click.command("export")
@click.argument("runs", nargs=-1)
@click.option("--format", "name", required=True, help=f"One of {', '.join(FORMATS)}.")
@choice_options
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="New file, or folder; standard output without it."
)
@click.option(
    "--calls",
    type=click.Choice(["text", "native"]),
    default="text",
    show_default=True,
    help="messages: calls in the assistant's text as they were written, or in `tool_calls`.",
)
@click.option("--redact", is_flag=True, help="Take secrets out first; blobs stay behind.")
@click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
def command(
    runs: tuple[str, ...],
    name: str,
    task: str | None,
    since: str | None,
    policy: str | None,
    successes: bool,
    out: Path | None,
    calls: messages.Calls,
    redact: bool,
    log: str | None,
) -> int:
    """Write RUNS, or every run that the filters choose, in another format.

    \b
    jsonl     our own: verdicts, feedback and blobs with them; `log import` gives the same log
    messages  OpenAI messages, for SFT
    atif      ATIF v1.8: one run to FILE.json, many to FILE.jsonl or to a folder
    nemo-gym  NeMo Gym rollouts with the token triple
    harbor    a Harbor job's results directory

    Preference pairs and rows of tokens: `nano-rl export`.
    """
    if name in _ELSEWHERE:
        raise UsageError(f"--format {name} needs what runs are compared by: nano-rl export --format {name}")
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; the formats are {', '.join(FORMATS)}")
    if calls != "text" and name != "messages":
        raise UsageError("--calls belongs to --format messages")
    choice = ChosenRuns(names=runs, task=task, since=moment(since), policy=policy, successes=successes)
    with LogStore.open(log, create=False) as store:
        chosen = choice.read(store)
        if redact:
            chosen = redacted_runs(chosen, store.blobs)
        export = _Export(store, chosen, calls=calls, blobs=not redact)
        export.to(name, out)
    export.say()
    return 0


class _Export:
    """One export: the runs that went into it, and why others did not."""

    def __init__(
        self, store: LogStore, runs: Iterable[LoggedRun], *, calls: messages.Calls, blobs: bool
    ) -> None:
        self.store, self.runs, self.calls, self.blobs = store, runs, calls, blobs
        self.written = 0
        self.refused: Counter[str] = Counter()
        self.missing: set[str] = set()
        self.out: Path | None = None

    def to(self, name: str, out: Path | None) -> None:
        """Raises UsageError where nothing is left to write, or `out` cannot be."""
        self.out = out
        if name == "harbor":
            self._harbor(out)
        elif name == "atif" and out is not None and out.suffix not in (".json", ".jsonl"):
            self._atif_folder(out)
        elif name == "atif" and (out is None or out.suffix == ".json"):
            self._one(out)
        else:
            with new_file(out) as file:
                self._lines(name, file)
                self._refuse_empty()

    def say(self) -> None:
        for reason, count in self.refused.most_common():
            print(f"left out: {count} runs ({printable(reason)})", file=sys.stderr)
        if self.missing:
            print(f"missing in the log's blobs, so left out: {len(self.missing)} blobs", file=sys.stderr)
        if self.out is not None:
            print(f"{self.written} runs in {self.out}")

    def _lines(self, name: str, file: TextIO) -> None:
        if name == "jsonl":
            rows: Iterable[Any] = whole.write(
                self._counted(), self.store.blobs if self.blobs else None, self.missing
            )
        else:
            rows = self._rows(name)
        for row in rows:
            file.write(json.dumps(row) + "\n")  # in ASCII, so that it holds any text in any locale

    def _counted(self) -> Iterator[LoggedRun]:
        for run in self.runs:
            self.written += 1
            yield run

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            try:
                row = self._row(name, run)
            except Refused as problem:
                self.refused[str(problem)] += 1
                continue
            self.written += 1
            yield row

    def _row(self, name: str, run: LoggedRun) -> dict[str, Any]:
        first = opening(run.trajectory, self.store.blobs)
        offered = tools(run.trajectory)
        if name == "messages":
            return messages.write(run.trajectory, first, calls=self.calls, tools=offered)
        write = atif.write if name == "atif" else nemo_gym.write
        return write(run, first, tools=offered)

    def _one(self, out: Path | None) -> None:
        rows = self._rows("atif")
        row = next(rows, None)
        self._refuse_empty()
        if next(rows, None) is not None:
            raise UsageError("one ATIF file holds one run: name a folder or a .jsonl file with -o for many")
        with new_file(out) as file:
            file.write(json.dumps(row) + "\n")

    def _atif_folder(self, out: Path) -> None:
        with new_folder(out) as folder:
            for row in self._rows("atif"):
                (folder / f"{row['trajectory_id']}.json").write_text(json.dumps(row) + "\n")
            self._refuse_empty()

    def _harbor(self, out: Path | None) -> None:
        if out is None:
            raise UsageError("--format harbor writes a directory; name it with -o")
        with new_folder(out) as folder:
            job = HarborJob(folder)
            for run in self._counted():
                job.add(run, opening(run.trajectory, self.store.blobs), tools(run.trajectory))
            self._refuse_empty()
            job.close()

    def _refuse_empty(self) -> None:
        if not self.written:
            why = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            raise UsageError(
                f"none of the runs can be written: {why}"
                if why
                else "the log holds no run that was asked for; see nano-coder log list"
            )
