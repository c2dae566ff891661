"""`nano-coder log`: list, show, verify, export, import, path."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from nano_coder.commands.display import Display
from nano_coder.commands.options import Log, RunArgument, Verbose, open_log
from nano_coder.config import load_config
from nano_shared.command_line import Console, JsonOption, emit, lazy_app
from nano_shared.printable import printable
from nano_shared.redact.redactor import Redactor
from nano_shared.redact.store import redact_run
from nano_shared.store import LogStore, RunSummary

command = lazy_app(
    "nano-coder.log",
    {
        "list": (f"{__name__}:list_runs", "The newest runs, a line each."),
        "show": (f"{__name__}:show", "One run whole: the task, each step, the diff, the verdict."),
        "verify": ("nano_coder.commands.log_verify", "May runs train a policy gradient, and if not, why?"),
        "export": ("nano_coder.commands.log_transfer:export", "Write runs in another format."),
        "import": ("nano_coder.commands.log_transfer:import_runs", "Add the runs of files to the log."),
        "migrate": ("+cluster", "Copy a log into another, as to Postgres."),
        "redact": (f"{__name__}:redact", "Take the secrets out of runs for good."),
        "path": (f"{__name__}:path", "Where the log is."),
    },
    help="Look at the log of runs, and move runs in and out of it.",
)
_WIDTHS = {
    "run": 16, "started": 16, "policy": 10, "task": 16, "turns": 5, "tokens": 6, "stop": 13, "reward": 6,
}  # fmt: skip
"""characters that a column needs to be of use"""
_LEFT_OUT = ("policy", "tokens", "started", "turns", "task", "stop")
"""on a terminal that is too narrow for all, in this order"""
_PIPED = 200


def list_runs(
    limit: Annotated[int, Option("-n", min=1, help="Newest runs shown.")] = 20,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """The newest runs, a line each."""
    runs = open_log(log).runs(limit=limit)
    emit(runs, as_json, lambda: _show_list(runs))
    return 0


def _show_list(runs: Sequence[RunSummary]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED)
    table = Table(box=None)
    columns = _columns(console.width)
    needed = sum(_WIDTHS[name] + 2 for name in columns)
    spare, console.width = console.width - needed, max(console.width, needed)
    for name in columns:
        # rich would shrink them all alike
        more = max(0, min(spare, 48) // 2) if name in ("policy", "task") else 0
        table.add_column(name, no_wrap=True, width=_WIDTHS[name] + more)
    for run in runs:
        cells = {
            "run": run.id,
            "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
            "policy": printable(run.policy),
            "task": " ".join(printable(run.prompt).split())[:40],
            "turns": str(run.turns),
            "tokens": str(run.sampled_tokens),
            "stop": run.stop or "unfinished",
            "reward": "" if run.reward is None else f"{run.reward:g}",
        }
        table.add_row(*(cells[name] for name in columns))
    console.print(table)


def _columns(width: int) -> list[str]:
    """The columns that fit; the run and its reward stay at any width."""
    columns = list(_WIDTHS)
    for name in _LEFT_OUT:
        if sum(_WIDTHS[column] + 2 for column in columns) <= width:
            break
        columns.remove(name)
    return columns


def show(run: RunArgument, verbose: Verbose = False, log: Log = None, as_json: JsonOption = False) -> int:
    """One run whole: the task, each step, the diff, the verdict."""
    trajectory = open_log(log).get(run)
    emit(trajectory, as_json, lambda: Display(quiet=False, verbose=verbose, answer=True).whole(trajectory))
    return 0


def redact(runs: Annotated[list[str], Argument(metavar="RUN...")], log: Log = None) -> int:
    """Take the secrets out of RUNS for good: what they held before is dropped, not kept beside it.

    The rules are those of `redact` in nano.toml. All token ids of a run that held a secret become
    placeholders: it trains no policy gradient any more. Snapshots of workspaces stay as they are.
    """
    config, _ = load_config({"log": log}, Path())
    redactor = Redactor(config.redact)
    with LogStore.open(config.log, create=False) as store:
        for run in runs:
            changed = redact_run(store, store.resolve(run), redactor)
            print(f"run {store.resolve(run)}: {'redacted' if changed else 'nothing to redact'}")
    return 0


def path(log: Log = None) -> int:
    """Where the log is."""
    print(open_log(log, create=True).url)
    return 0
