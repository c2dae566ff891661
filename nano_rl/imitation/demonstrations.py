"""Where demonstrations come from: the tasks' oracles, run for real, or successes that lie in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from nano_coder.runtime import OpenedWeights, Runtime, local_policy
from nano_rl.config import TrainConfig
from nano_rl.imitation.oracle import ORACLE, oracle_runs
from nano_rl.imitation.rows import NO_DIRECTORY, Demonstrations, Reader, opens, succeeded
from nano_rl.logs.source import undamaged
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Split, Task, Trajectory


def reader_of(opened: OpenedWeights) -> Reader:
    """How a model's tokens are read and written."""
    template = local_policy(opened.loaded, opened.profile).template
    return Reader(profile=opened.profile, template=template, eos_id=opened.loaded.tokenizer.eos_token_id)


def open_demonstrations(
    config: TrainConfig,
    tasks: Sequence[Task],
    runtime: Runtime,
    opened: OpenedWeights,
    rest: Sequence[Trajectory] = (),
) -> Demonstrations | None:
    """What `lambda_sft` imitates besides the step's own successes; None where it imitates those, or nothing.

    `rest` are the runs that `imitate` = rest chooses the successes of. Raises UsageError for a task without
    an oracle that works, and where the log holds no success.
    """
    if config.lambda_sft == 0 or config.imitate == "own":
        return None
    if config.imitate == "oracles":
        runs = oracle_runs(tasks, replace(runtime, policy_name=ORACLE))
    elif config.imitate == "rest":
        reader = reader_of(opened)
        runs = [run for run in rest if succeeded(run) and reader.speaks(run)]
    else:
        runs, refused = logged_successes(runtime.store, reader_of(opened), keys={task.key for task in tasks})
        if not runs:
            raise UsageError(
                f"imitate = log: the log holds no success on these tasks that could be imitated{why(refused)}"
            )
    reader = reader_of(opened)
    rows = tuple(row for run in runs for row in reader.rows(run, runtime.store.blobs))
    return Demonstrations(rows=rows, batch=config.prompts_per_step, seed=config.seed)


def logged_successes(
    store: LogStore, reader: Reader, *, keys: Collection[str] | None = None
) -> tuple[list[Trajectory], Counter[str]]:
    """The runs that passed what graded them and may be imitated, oldest first, and why others may not.

    Runs of the test split are never imitated. `keys` keeps the runs of some tasks.
    """
    kept, refused = [], Counter[str]()
    for run in undamaged(store, refused):
        if keys is not None and run.task.key not in keys:
            continue
        if run.task.split is Split.TEST:
            refused["of the test split"] += 1
        elif not succeeded(run):
            refused["no success"] += 1
        elif not reader.speaks(run):
            refused[f"profile {run.profile}, not {reader.profile.name}"] += 1
        elif not reader.reads(run) and not opens(run, store.blobs):
            refused[NO_DIRECTORY] += 1
        else:
            kept.append(run)
    return kept, refused


def why(refused: Counter[str]) -> str:
    """The counts of a refusal as the end of a sentence."""
    listed = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return f" ({listed})" if listed else ""
