"""`nano-coder log migrate`: a whole log into another, of SQLite or Postgres."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

from typer import Argument

from nano_shared.command_line import JsonOption
from nano_shared.log_copy import Copied
from nano_shared.printable import printable
from nano_shared.store import LogStore

_EVERY = 10_000


def command(
    source: Annotated[str, Argument(metavar="FROM", help="Path of a log, or postgresql://... of one.")],
    target: Annotated[str, Argument(metavar="TO", help="The log that gains its runs; made if need be.")],
    as_json: JsonOption = False,
) -> int:
    """Copy the log FROM into the log TO, blobs too: from SQLite to Postgres, or back.

    FROM stays as it is. Repeat the command after an interruption, or when FROM has grown: what TO has already
    is left as it is. Nothing is copied if TO holds another run with the id of one of FROM's.

    \b
    nano-coder log migrate ~/log.db 'postgresql://nano@db.example/nano?blobs=/mnt/shared/blobs'
    """
    done, shown = Copied(), 0

    def tell(runs: int) -> None:
        nonlocal shown
        if runs // _EVERY > shown:
            shown = runs // _EVERY
            print(f"{runs} runs ...", file=sys.stderr)

    with LogStore.open(source, create=False) as old, LogStore.open(target) as new:
        new.copy_from(old, done, tell)
    if as_json:
        print(json.dumps(asdict(done)))
    else:
        print(_sentence(done))
    for damage in done.damaged_blobs:
        print(printable(f"left out: {damage}"), file=sys.stderr)
    return 1 if done.damaged_blobs else 0


def _sentence(done: Copied) -> str:
    parts = [f"copied {done.runs} runs, {done.turns} turns and {done.blobs} blobs"]
    parts += [f"{done.extended} runs were continued"] if done.extended else []
    parts += [f"{done.known} runs were there already"] if done.known else []
    parts += [f"{done.known_blobs} blobs were there already"] if done.known_blobs else []
    parts += [f"{done.other_rows} notes"] if done.other_rows else []
    parts += [f"{len(done.damaged_blobs)} damaged blobs were left out"] if done.damaged_blobs else []
    return "; ".join(parts)
