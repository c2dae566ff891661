"""`nano-coder log delete` and `prune`: take runs out of the log, and out of what trains on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
import typer
from typer import Argument, Option

from nano_coder.commands.display import on_terminal
from nano_coder.commands.options import DirectoryOption, Log, open_log
from nano_logs.deletion import Deletion, children, delete_runs, plan_deletion
from nano_shared import schema
from nano_shared.checkpoint import checkpoint_names, read_checkpoint
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import CheckpointError, LogError, UsageError
from nano_shared.files import checkpoints_dir, real_path
from nano_shared.owners import project_of
from nano_shared.printable import printable
from nano_shared.run_facts import moment
from nano_shared.store import LogStore
from nano_shared.types import CLIENT_TOOLS

Yes = Annotated[bool, Option("--yes", help="Do not ask.")]


def delete(
    runs: Annotated[list[str], Argument(metavar="RUN...")],
    yes: Yes = False,
    directory: DirectoryOption = Path(),
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Delete RUNS of yours: their rows, the files that no other run needs, and what they could have taught.

    Says first what would go, and which checkpoints were trained on it: those stay as they are.
    """
    with open_log(log, directory) as store:
        ids = list(dict.fromkeys(store.resolve(run) for run in runs))
        for run in ids:
            _refuse(store, run)
        return _delete(store, ids, yes=yes, as_json=as_json)


def prune(
    older: Annotated[str, Option(metavar="WHEN", help="Runs begun before so long ago, as 90d, or a date.")],
    project: Annotated[
        Path | None, Option(metavar="DIR", help="Runs of this project alone, wherever it lay.")
    ] = None,
    yes: Yes = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Delete your old runs as `log delete` does, but those that younger ones go on from."""
    before = moment(older, option="--older")
    with open_log(log) as store:
        ids, kept = _old(store, before or 0.0, project)
        if kept:
            print(f"{kept} runs stay: others go on from them, or they are going on", file=sys.stderr)
        if not ids:
            print("no run of yours is that old", file=sys.stderr)
            return 0
        return _delete(store, ids, yes=yes, as_json=as_json)


def _old(store: LogStore, before: float, project: Path | None) -> tuple[list[str], int]:
    """Ids of the user's runs that began before and may go, and the number of those that have to stay."""
    runs, user = schema.runs.c, store.user
    query = sa.select(runs.id, runs.stop, runs.tools_hash).where(runs.started < before)
    if user is not None:
        query = query.where(user.made(runs))
    if project is not None:
        directory = str(real_path(project))
        query = query.where(sa.or_(runs.project == project_of(directory), runs.directory == directory))

    def find(connection: sa.Connection) -> tuple[list[str], int]:
        found = connection.execute(query.order_by(runs.started, runs.id)).all()
        chosen = frozenset(row.id for row in found if row.stop is not None or not _goes_on(store, row))
        while parents := {parent for parent, _ in children(connection, chosen)}:
            chosen -= parents
        return [row.id for row in found if row.id in chosen], len(found) - len(chosen)

    return store.read(find)


def _goes_on(store: LogStore, row: Any) -> bool:
    """Whether a run that has not ended is a client's open conversation, or executed by a process."""
    try:
        with store.claim(row.id):
            return str(row.tools_hash).startswith(CLIENT_TOOLS)
    except LogError:
        return True


def _refuse(store: LogStore, run: str) -> None:
    """Raises UsageError for a run of another owner, and for an open conversation."""
    runs = schema.runs.c
    query = sa.select(runs.owner, runs.stop, runs.tools_hash).where(runs.id == run)
    row = store.read(lambda connection: connection.execute(query).one())
    if store.user is not None and not store.user.owns(row.owner):
        raise UsageError(f"run {run} is of {row.owner}, who alone deletes it (the setting `owner` names you)")
    if row.stop is None and row.tools_hash.startswith(CLIENT_TOOLS):
        raise UsageError(f"run {run} is an open conversation: a reward ends it, or some minutes of silence")


def _delete(store: LogStore, ids: Sequence[str], *, yes: bool, as_json: bool) -> int:
    plan = plan_deletion(store, ids)
    for line in (_sentence("would go:", plan), *_taught(frozenset(ids))):
        print(printable(line), file=sys.stderr)
    if not yes:
        if not on_terminal():
            raise UsageError("nothing was deleted: --yes deletes without a question")
        typer.confirm("Delete them for good?", abort=True, err=True)
    done = delete_runs(store, ids)
    emit(done, as_json, lambda: print(_sentence("deleted:", done)))
    return 0


def _sentence(begin: str, what: Deletion) -> str:
    why = "more files were written within the last hour or cannot be removed: the next deletion tries again"
    said = f"{begin} {what.runs} runs and {what.blobs} files that nothing else needs, {what.bytes:,} bytes"
    return said + (f"; {what.left} {why}" if what.left else "")


def _taught(ids: frozenset[str]) -> list[str]:
    """A sentence for each checkpoint that was trained on one of the runs, or may have been."""
    lines = []
    for name in checkpoint_names():
        try:
            trained = read_checkpoint(checkpoints_dir() / name, verify=False).trained_on
        except CheckpointError as problem:
            lines.append(f"{problem}: it may have been trained on them")
            continue
        listed = len(trained.run_ids)
        if known := ids.intersection(trained.run_ids):
            lines.append(f"checkpoint {name} was trained on {len(known)} of them, and stays as it is")
        elif trained.runs > listed:
            some = f"{listed} of the {trained.runs} runs that it was trained on"
            lines.append(f"checkpoint {name} names {some}: these may be among the others")
    return lines
