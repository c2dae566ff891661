"""`nano-rl checkpoints`: list, show, promote, roll back, export, and the best of a training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from nano_rl.commands.eval import How, how_options, print_differences
from nano_rl.commands.lineage_report import as_json_report, print_lineage, summaries
from nano_rl.commands.session import checkpoint_target, dtype_option, log_option, trainings_dir
from nano_shared.checkpoint import resolve_checkpoint
from nano_shared.printable import printable


@click.group("checkpoints")
def command() -> None:
    """List checkpoints, show one's lineage, promote on evidence, go back, keep a training's best state."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def list_checkpoints(as_json: bool) -> int:
    """Every checkpoint, with its parent and its newest score; the promoted one is marked."""
    found = summaries()
    if as_json:
        print(json.dumps(found))
        return 0
    for row in found:
        marked = "  (promoted)" if row["promoted"] else ""
        told = row["problem"] or f"from {row['parent'] or '-'}  {row['score'] or 'not evaluated'}"
        print(printable(f"{row['name']}  {told}{marked}"))
    return 0


@command.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def show(name: str, as_json: bool) -> int:
    """Where a checkpoint comes from, its files verified: parents up to the base, what it was trained on, its
    settings, its scores, and on what evidence it was promoted."""
    folder = Path(resolve_checkpoint(name))
    if as_json:
        print(json.dumps(as_json_report(folder)))
    else:
        print_lineage(folder)
    return 0


@command.command("promote")
@click.argument("name")
@click.option(
    "--tasks", "tasks_file", type=click.Path(path_type=Path),
    help="Held-out tasks to compare on now; without it, a stored nano-rl eval is the evidence.",
)  # fmt: skip
@click.option("--against", help="Checkpoint to beat.  [default: the promoted one, else the shipped one]")
@click.option("--force", is_flag=True, help="Promote whatever the evidence says; that is recorded.")
@how_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def promote_checkpoint(
    name: str, tasks_file: Path | None, against: str | None, force: bool, as_json: bool, **how: Any
) -> int:
    """Make NAME the model that nano-coder runs when none is named, if it is better beyond noise.

    Better: on held-out tasks, paired, the lower end of the 95 % interval above 0, and worse on no suite.
    Exit code 1 where it is not, 2 where there is no evidence.
    """
    from nano_rl.commands.promote import decide
    from nano_rl.tasks.make import read_tasks

    setting = None if tasks_file is None else How(tasks=read_tasks(tasks_file), **how)
    decision = decide(Path(resolve_checkpoint(name)), name, setting, against, force=force)
    if as_json:
        print(json.dumps(decision.report()))
    else:
        if decision.evidence:
            print_differences(decision.evidence.overall, decision.evidence.suites)
        print("\n".join(decision.sentences()))
    return 0 if decision.promoted else 1


@command.command("rollback")
@click.option("--to", help="A checkpoint that was promoted earlier.  [default: the one before]")
def rollback(to: str | None) -> int:
    """Promote again what was promoted before; repeated, it goes further back."""
    from nano_rl.checkpoints.promotion_history import roll_back

    record = roll_back(to)
    print(f"{record.previous} is no longer promoted; ", end="")
    print(f"{record.name} is" if record.name else "nothing is, so nano-coder runs the shipped policy")
    return 0


@command.command("history")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def history(as_json: bool) -> int:
    """Every promotion and every way back, the oldest first."""
    from nano_rl.checkpoints.promotion_history import read_history
    from nano_rl.commands.lineage_report import promotion_line

    records = read_history()
    if as_json:
        print(json.dumps([record.model_dump(mode="json") for record in records]))
        return 0
    for record in records:
        print(printable(f"{record.name or 'the shipped policy'}  {promotion_line(record)}"))
    return 0


@command.command("best")
@click.argument("training")
@click.option("--as", "name", required=True, help="Name of the checkpoint to write.")
@log_option
def best(training: str, name: str, log: str | None) -> int:
    """Make a checkpoint of the best state that TRAINING has saved, also when it was stopped short."""
    from nano_rl.resume.progress import save_best
    from nano_shared.store import LogStore

    target = checkpoint_target(name)
    with LogStore.open(log) as store:
        print(save_best(trainings_dir() / training, target, store).model_dump_json(indent=2))
    return 0


@command.command("export")
@click.argument("name")
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    required=True,
    help="New folder to write, with its parents.",
)
@click.option("--adapter", is_flag=True, help="Adapter and base apart, in TO/adapter and TO/base.")
@dtype_option
def export(name: str, target: Path, adapter: bool, dtype: str) -> int:
    """Write NAME for programs without nano: a model that transformers and vLLM load, or with --adapter a PEFT
    adapter beside its base."""
    from nano_rl.checkpoints.checkpoint import ADAPTER_FOLDER, BASE_FOLDER, export_checkpoint

    export_checkpoint(name, target, adapter=adapter, dtype=dtype)
    print(printable(str(target / ADAPTER_FOLDER if adapter else target)))
    if adapter:
        print(printable(f"its base: {target / BASE_FOLDER}"), file=sys.stderr)
    return 0
