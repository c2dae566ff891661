"""`nano-rl export`: the log's runs as rows of tokens with advantages, for other trainers."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from nano_coder.commands.options import PolicyChoice, SinceChoice, TaskChoice, open_log
from nano_coder.verify.trainable import RefusalCode
from nano_rl.commands.options import Log
from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.run_facts import ChosenRuns, moment
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


def command(
    name: Annotated[Literal["tokens"], Option("--format", help="What a row holds.")] = "tokens",
    task: TaskChoice = None,
    since: SinceChoice = None,
    policy: PolicyChoice = None,
    out: Annotated[Path | None, Option("-o", "--out", help="New .jsonl file; else standard output.")] = None,
    baseline: Annotated[
        Literal["mean", "rloo", "none"],
        Option(help="What is taken from a reward; with none, runs that are alone come too."),
    ] = "mean",
    log: Log = None,
) -> int:
    """Write what the log's runs teach by comparison with each other, one task in memory at a time.

    A row has prompt_ids, completion_ids, completion_mask, logprobs, advantages and reward; preference pairs
    are written by nano-rl preferences build.
    """
    from nano_rl.logs.token_rows import token_rows
    from nano_shared.files import new_file

    choice = ChosenRuns(task=task, since=moment(since), policy=policy)
    refused, written = Counter[str](), 0
    with open_log(log) as store, new_file(out) as file:
        for _, ids in groupby(choice.ids(store, by_task=True), key=lambda found: found[1]):
            runs = _consented(store, [run for run, _ in ids], refused)
            for row in token_rows(runs, refused, baseline=baseline):
                file.write(json.dumps(row) + "\n")
                written += 1
        if not written:
            raise UsageError(
                "no run of the log can be compared with another of its task: it takes two that are graded and"
                " earned different rewards; see nano-coder log list"
            )
    for reason, count in refused.most_common():
        print(f"left out: {count} ({printable(reason)})", file=sys.stderr)
    if out is not None:
        print(f"{written} rows in {out}")
    return 0


def _consented(store: LogStore, ids: Sequence[str], refused: Counter[str]) -> Iterator[Trajectory]:
    for run_id in ids:
        run = store.get(run_id)
        if store.withholds(run):
            refused[RefusalCode.NO_CONSENT.value] += 1
        else:
            yield run
