"""`nano-rl sft`: imitate oracles, successes in the log, or conversations of a file."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nano_coder.commands.options import open_log
from nano_rl.commands.options import DeviceOption, Log, ModelOption, NameOption
from nano_rl.config import SftConfig
from nano_shared.command_line import JsonOption
from nano_shared.errors import UsageError
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights
    from nano_rl.commands.progress import OfflineRows


@settings_options(SftConfig, {"Learning": ("optimizer.learning_rate", "epochs", "lora_rank")})
def command(
    settings: Settings[SftConfig],
    name: NameOption,
    model: ModelOption = None,
    device: DeviceOption = None,
    tasks: Annotated[Path | None, Option(help="Tasks whose oracles are run.")] = None,
    from_logs: Annotated[
        bool, Option("--from-logs", help="The runs in the log that passed what graded them.")
    ] = False,
    messages: Annotated[
        Path | None, Option(help='Conversations, a line each: {"messages": a list of {"role", "content"}}.')
    ] = None,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Imitate and write checkpoint NAME. Several sources may be given: their rows are put together."""
    from nano_rl.command_setup import adapter_rank, looked_first
    from nano_rl.commands.progress import train_offline

    config = settings.config(adapter_rank(settings, model))
    if not (tasks or from_logs or messages):
        raise UsageError("name what to imitate: --tasks FILE, --from-logs or --messages FILE")
    parent = looked_first(model, (tasks, messages), log, from_logs)
    from nano_rl.imitation import train_sft

    read = partial(_lessons, tasks_file=tasks, from_logs=from_logs, messages_file=messages, log=log)
    train_offline(
        name, parent, config, device, read, train_sft, label="imitation", shown={"loss": ".3f"},
        as_json=as_json,
    )  # fmt: skip
    return 0


def _lessons(
    opened: OpenedWeights, tasks_file: Path | None, from_logs: bool, messages_file: Path | None,
    log: str | None,
) -> OfflineRows:  # fmt: skip
    """All rows to imitate. Raises UsageError for bad rows, oracles that fail and sources without any row."""
    from nano_rl.command_setup import oracle_runtime
    from nano_rl.commands.progress import LOGGED, OfflineRows, bar
    from nano_rl.gather.rollouts import ORACLE
    from nano_rl.imitation import all_that_fit, logged_successes, oracle_runs, read_messages, reader_of, why
    from nano_rl.tasks.task_file import read_tasks

    reader = reader_of(opened)
    rows = read_messages(messages_file, reader) if messages_file else []
    tasks = list(read_tasks(tasks_file)) if tasks_file else []
    runs, blobs = [], None
    if tasks:
        runtime = replace(oracle_runtime(log), profile=opened.profile)
        with bar("oracle runs", len(tasks), LOGGED) as progress:
            runs = oracle_runs(tasks, runtime, on_run=lambda _: progress.advance())
            progress.reach(len(tasks), len(tasks))
        blobs = runtime.store.blobs
    if from_logs:
        store = open_log(log)
        blobs = store.blobs
        successes, refused = logged_successes(store, reader)
        # the oracles of --tasks are in the log too by now
        known = {run.id for run in runs}
        successes = [run for run in successes if run.id not in known and (run.policy != ORACLE or not tasks)]
        print(f"imitated from the log: {len(successes)} runs{why(refused)}", file=sys.stderr)
        if not successes:
            raise UsageError(f"the log holds no success that could be imitated{why(refused)}")
        runs += successes
        tasks += [run.task for run in successes]
    encoded = sum(not reader.reads(run) for run in runs) + len(rows)
    rows += [
        row for rows_of_run in all_that_fit(runs, partial(reader.rows, blobs=blobs)) for row in rows_of_run
    ]
    longest = max((len(row.ids) for row in rows), default=0)
    print(
        f"rows: {len(rows)}, {encoded} of them texts, encoded here by the template; the longest has {longest}"
        " tokens",
        file=sys.stderr,
    )
    return OfflineRows(rows=rows, run_ids=[run.id for run in runs], tasks=tasks)
