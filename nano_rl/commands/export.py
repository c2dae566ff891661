"""`nano-rl export`: what runs teach by comparison, for other trainers."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from nano_coder.commands.options import PolicyChoice, SinceChoice, TaskChoice, open_log
from nano_rl.commands.options import Log
from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.run_facts import ChosenRuns, RunFacts, RunFilter, moment
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


class TaskView:
    """Reads as the log does, but for `trajectories` and `facts`."""

    def __init__(self, store: LogStore, run_ids: Iterable[str]) -> None:
        self._store = store
        self._run_ids = tuple(run_ids)

    def trajectories(self) -> Iterator[Trajectory]:
        for run_id in self._run_ids:
            yield self._store.get(run_id)

    def facts(self) -> Iterator[RunFacts]:
        # run by run: the log's own would read the columns of every task once a task
        for run_id in self._run_ids:
            yield from self._store.facts(RunFilter(runs=(run_id,)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


FORMATS = ("preferences", "tokens")
_BATCH = 256
"""rows of one parquet row group, and most that are in memory"""


def command(
    name: Annotated[str, Option("--format", help=f"One of {', '.join(FORMATS)}.")],
    task: TaskChoice = None,
    since: SinceChoice = None,
    policy: PolicyChoice = None,
    out: Annotated[
        Path | None,
        Option("-o", "--out", help="New file, .jsonl or, for tokens, .parquet; else standard output."),
    ] = None,
    baseline: Annotated[
        Literal["mean", "rloo", "none"],
        Option(help="tokens: what is taken from a reward; with none, runs that are alone come too."),
    ] = "mean",
    redact: Annotated[bool, Option("--redact", help="Take secrets out first (preferences).")] = False,
    log: Log = None,
) -> int:
    """Write what the log's runs teach by comparison with each other.

    \b
    preferences  {"prompt", "chosen", "rejected"} as messages, as TRL's DPO and reward trainers take them
    tokens       prompt_ids, completion_ids, completion_mask, logprobs, advantages, reward

    Runs are compared within their task, one task in memory at a time.
    """
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; the formats are {', '.join(FORMATS)}")
    if redact and name == "tokens":
        raise UsageError("--redact: ids cannot be redacted here; export text, or redact the log itself")
    parquet = out is not None and out.suffix == ".parquet"
    if parquet and name == "preferences":
        raise UsageError("preference pairs are written as JSON lines; name a .jsonl file with -o")
    choice = ChosenRuns(task=task, since=moment(since), policy=policy)
    refused: Counter[str] = Counter()
    with open_log(log) as store:
        if name == "preferences":
            rows = _preferences(store, choice, refused, redact)
        else:
            rows = _tokens(store, choice, refused, baseline)
        written = _parquet(out, rows) if parquet and out is not None else _lines(out, rows)
    for reason, count in refused.most_common():
        print(f"left out: {count} ({printable(reason)})", file=sys.stderr)
    if out is not None:
        print(f"{written} rows in {out}")
    return 0


def _tasks(store: LogStore, choice: ChosenRuns) -> Iterator[list[str]]:
    """The run ids of each task."""
    for _, ids in groupby(choice.ids(store, by_task=True), key=lambda found: found[1]):
        yield [run_id for run_id, _ in ids]


def _tokens(
    store: LogStore, choice: ChosenRuns, refused: Counter[str], baseline: Any
) -> Iterator[dict[str, Any]]:
    from nano_rl.logs.token_rows import token_rows

    for run_ids in _tasks(store, choice):
        yield from token_rows((store.get(run_id) for run_id in run_ids), refused, baseline=baseline)


def _preferences(
    store: LogStore, choice: ChosenRuns, refused: Counter[str], redact: bool
) -> Iterator[dict[str, Any]]:
    from nano_rl.gather.sources import PAIR_TERMS
    from nano_shared.redact.trajectory import redacted

    log_pairs = PAIR_TERMS.find("preferences").log_pairs
    for run_ids in _tasks(store, choice):
        view: Any = TaskView(store, run_ids)
        found = log_pairs(view)
        refused.update(found.refused)
        for pair in map(redacted, found.pairs) if redact else found.pairs:
            sides = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            yield {
                side: [{"role": m.role.value, "content": m.content} for m in messages]
                for side, messages in sides.items()
            }


def _lines(out: Path | None, rows: Iterable[dict[str, Any]]) -> int:
    from nano_shared.files import new_file

    written = 0
    with new_file(out) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            written += 1
        _refuse_empty(written)
    return written


def _parquet(out: Path, rows: Iterator[dict[str, Any]]) -> int:
    from itertools import islice

    from nano_shared.files import new_binary

    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f"{out}: parquet needs pyarrow; install it, or name a .jsonl file") from None
    schema = _schema(pa)
    written = 0
    with new_binary(out) as temporary:
        with pq.ParquetWriter(temporary, schema) as writer:
            while batch := list(islice(rows, _BATCH)):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                written += len(batch)
        _refuse_empty(written)
    return written


def _schema(pa: Any) -> Any:
    ids, numbers = pa.list_(pa.int64()), pa.list_(pa.float64())
    types = {
        "run": pa.string(), "task": pa.string(), "reward": pa.float64(), "temperature": pa.float64(),
        "policy_versions": ids, "prompt_ids": ids, "completion_ids": ids,
        "completion_mask": pa.list_(pa.int8()), "logprobs": numbers, "advantages": numbers,
    }  # fmt: skip
    return pa.schema(list(types.items()))


def _refuse_empty(written: int) -> None:
    if not written:
        raise UsageError(
            "no run of the log can be compared with another of its task: it takes two that are graded and"
            " earned different rewards; see nano-coder log list"
        )
