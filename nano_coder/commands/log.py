"""`nano-coder log`: list, show, path; the plug-in logs has the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Option

from nano_coder.commands.options import DirectoryOption, Log, RunArgument, Verbose, open_log
from nano_shared.command_line import Console, JsonOption, emit, lazy_app
from nano_shared.printable import printable
from nano_shared.run_facts import RunFilter
from nano_shared.store import RunSummary

command = lazy_app(
    "nano-coder.log",
    {
        "list": (f"{__name__}:list_runs", "Your newest runs, a line each."),
        "show": (f"{__name__}:show", "One run whole: the task, each step, the diff, the verdict."),
        "verify": ("+logs", "May runs train a policy gradient, and if not, why?"),
        "export": ("+logs", "Write runs in another format."),
        "import": ("+logs", "Add the runs of files to the log."),
        "migrate": ("+cluster", "Copy a log into another, as to Postgres."),
        "redact": ("+logs", "Take the secrets out of runs for good."),
        "delete": ("+logs", "Delete runs, and files that only they need."),
        "prune": ("+logs", "Delete your old runs."),
        "stats": ("+logs", "What became of your runs, and what they cost."),
        "path": (f"{__name__}:path", "Where the log is."),
    },
    help="Look at the log of runs, and move runs in and out of it.",
)
_WIDTHS = {
    "run": 16, "started": 16, "policy": 10, "task": 16, "turns": 5, "tokens": 6, "stop": 13, "reward": 6,
    "owner": 20,
}  # fmt: skip
"""characters that a column needs to be of use"""
_LEFT_OUT = ("policy", "tokens", "started", "turns", "task", "stop")
"""on a terminal that is too narrow for all, in this order"""
_PIPED = 200


def list_runs(
    limit: Annotated[int, Option("-n", min=1, help="Newest runs shown.")] = 20,
    by: Annotated[str | None, Option(metavar="OWNER|all", help="Whose, if not yours.")] = None,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Your newest runs, a line each; those of others, too, that their owners share, with --by all."""
    runs = open_log(log).runs(limit, by)
    emit(runs, as_json, lambda: _show_list(runs, owners=by is not None))
    return 0


def _show_list(runs: Sequence[RunSummary], *, owners: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED)
    table = Table(box=None)
    columns = _columns(console.width, owners)
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
            "owner": printable(run.owner or ""),
        }
        table.add_row(*(cells[name] for name in columns))
    console.print(table)


def _columns(width: int, owners: bool) -> list[str]:
    """The columns that fit; the run, its reward and owner stay at any width."""
    columns = [name for name in _WIDTHS if owners or name != "owner"]
    for name in _LEFT_OUT:
        if sum(_WIDTHS[column] + 2 for column in columns) <= width:
            break
        columns.remove(name)
    return columns


def show(
    run: RunArgument,
    directory: DirectoryOption = Path(),
    verbose: Verbose = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """One run whole: the task, each step, the diff, the verdict."""
    from nano_coder.commands.display import Display

    store = open_log(log, directory)
    trajectory = store.get(run)

    def tell() -> None:
        display = Display(quiet=False, verbose=verbose, answer=True)
        display.whole(trajectory)
        runs = tuple(store.side_by_side(trajectory.id))
        group = list(store.facts(RunFilter(runs=runs)))
        tries = [one for one in group if one.parent not in runs]
        if len(tries) > 1:
            passed = [one.id for one in tries if one.reward is not None and one.reward >= 1]
            print(f"one of {len(tries)} tries; passed: {', '.join(passed) or 'none'}")
        for one in group:
            if one not in tries:
                display.escalated(store.get(one.id))

    emit(trajectory, as_json, tell)
    return 0


def path(log: Log = None) -> int:
    """Where the log is."""
    print(open_log(log, create=True).url)
    return 0
