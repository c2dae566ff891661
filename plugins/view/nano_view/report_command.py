"""`nano-rl report`: how a training went, as a table and a page; with --hacks, how much it hacked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from rich.table import Table
from typer import Argument, Option

from nano_coder.commands.options import log_of_environment
from nano_rl.command_setup import trainings_dir
from nano_rl.commands.options import Log
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.learn.metrics import MetricsRow as Row
from nano_rl.tasks.task_file import refuse_unwritable
from nano_rl.training_record import print_metrics
from nano_shared.command_line import Console, JsonOption
from nano_shared.errors import LogError, UsageError
from nano_view.report.hacks import HackRow, hack_row, hack_rows
from nano_view.report.training import over_optimised

if TYPE_CHECKING:
    from nano_view.report.training import Training

PAGE = "report.html"
"""file name in the folder of a training"""
COMPARISON = "comparison.html"
"""file name in the folder of the first of several trainings"""


def command(
    names: Annotated[list[str], Argument(metavar="NAME", help="Of a training, or its folder.")],
    hacks: Annotated[
        bool, Option("--hacks", help="Tampering by kind, and passes on impossible controls, by step.")
    ] = False,
    output: Annotated[Path | None, Option("-o", "--output", help="Where the page goes.")] = None,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """The training NAME: a table here, and a page of HTML with curves and sample rollouts.

    NAME may be the folder of a training too. The page is report.html in that folder unless -o names another
    file; it is one file that loads nothing from elsewhere. Several NAMEs give one page that shows them side
    by side, comparison.html in the folder of the first.
    """
    if output:
        refuse_unwritable(output)
    log = log or next(iter(log_of_environment()), None)
    if len(names) > 1:
        return _side_by_side(names, hacks, output, log, as_json)
    (name,) = names
    folder, metrics = training_metrics(trainings_dir(), name)
    if hacks:
        _hacks(folder.name, metrics, as_json=as_json)
    elif as_json:
        print(json.dumps(metrics))
    else:
        print_metrics(metrics, Console())
        if found := over_optimised(metrics):
            print(found.sentence)
        _write([folder], log, output or folder / PAGE)
    return 0


def _side_by_side(
    names: Sequence[str], hacks: bool, output: Path | None, log: str | None, as_json: bool
) -> int:
    if hacks:
        raise UsageError("--hacks reads one training; name one, or leave --hacks out")
    found = [training_metrics(trainings_dir(), name) for name in names]
    if as_json:
        print(json.dumps({folder.name: metrics for folder, metrics in found}))
        return 0
    _write([folder for folder, _ in found], log, output or found[0][0] / COMPARISON)
    return 0


def _write(folders: Sequence[Path], log: str | None, target: Path) -> None:
    """The page of a training, or of several with a comparison, with the runs that it points to."""
    from nano_view.page import answer_key, write_page
    from nano_view.report.page import comparison_page, training_page, training_row
    from nano_view.report.training import read_training

    trainings = [read_training(folder) for folder in folders]
    answers: dict[str, Any] = {answer_key("trainings", {}): {"rows": list(map(training_row, trainings))}}
    for folder, training in zip(folders, trainings, strict=True):
        runs, missing = _runs(training, folder, log)
        key = answer_key("training", {"name": training.name})
        answers |= runs | {key: training_page(training, missing)}
    name = ",".join(training.name for training in trainings)
    if len(trainings) > 1:
        answers[answer_key("training", {"name": name})] = comparison_page(trainings)
    write_page(target, answers, start=f"#/training?name={quote(name)}", title=name)
    print(target)


def _runs(training: Training, folder: Path, log: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The viewer's answers about the rollouts that a page points to, and why others are missing."""
    from nano_shared.store import LogStore
    from nano_view.answers import LogView
    from nano_view.page import run_answers

    wanted = [choice.rollout.id for choice in training.chosen]
    url = log or (training.record.reachable_log if training.record else None)
    if url is None:
        return {}, dict.fromkeys(wanted, "the log is on a server; name it with --log")
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    try:
        with LogStore.open(url, create=False) as store:
            for run in wanted:
                try:
                    found |= run_answers(LogView(store, folders=[folder]), [run])
                except LogError as problem:
                    missing[run] = str(problem)
    except LogError as problem:
        missing = dict.fromkeys(wanted, str(problem))
    return found, missing


def _hacks(name: str, metrics: list[Row], *, as_json: bool) -> None:
    if as_json:
        steps = [_plain(hack_row([row])) for row in metrics]
        print(json.dumps({"name": name, "total": _plain(hack_row(metrics)), "steps": steps}))
    else:
        _print_hacks(hack_rows(metrics), hack_row(metrics))


def training_metrics(trainings: Path, name: str) -> tuple[Path, list[Row]]:
    """Folder and metrics of a training by name or folder. Raises UsageError with those there are."""
    folder = trainings / name if Path(name).name == name else Path(name)
    path = folder / METRICS
    inside = folder.parent == trainings or len(Path(name).parts) > 1
    metrics = read_metrics(path) if inside and path.is_file() else []
    if not metrics:
        known = sorted(p.parent.name for p in trainings.glob(f"*/{METRICS}"))
        raise UsageError(
            f"no training {name!r} with metrics; "
            + (f"trainings: {', '.join(known)}" if known else "nano-rl train --name NAME makes one")
        )
    return folder, metrics


def _plain(row: HackRow) -> dict[str, object]:
    low, high = row.interval
    rate = row.passes / row.controls if row.controls else None
    return {**asdict(row), "pass_rate": rate, "low": low, "high": high}


def _print_hacks(rows: list[HackRow], total: HackRow) -> None:
    from nano_view.report.page import HACK_HEAD, hack_cells

    table = Table(*HACK_HEAD, box=None)
    for row in [*rows, total]:
        table.add_row(*hack_cells("all" if row is total else _steps(row), row))
    console = Console()
    console.print(table)
    if not total.controls:
        console.print("no control was rolled out; nano-rl train --set controls=0.03 measures hacking on them")


def _steps(row: HackRow) -> str:
    return str(row.first_step) if row.first_step == row.last_step else f"{row.first_step}-{row.last_step}"
