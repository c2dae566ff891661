"""`nano-coder log`: list, show, verify, export, import, path."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
from rich.table import Table

from nano_coder.commands import log_export, log_import, log_verify
from nano_coder.commands.display import Display
from nano_coder.config import load_config
from nano_shared.console import Console
from nano_shared.printable import printable
from nano_shared.redact import Redactor
from nano_shared.redact.store import redact_run
from nano_shared.store import LogStore

_LOG = click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
_WIDTHS = {
    "run": 16, "started": 16, "policy": 10, "task": 16, "turns": 5, "tokens": 6, "stop": 13, "reward": 6,
}  # fmt: skip
"""characters that a column needs to be of use"""
_LEFT_OUT = ("policy", "tokens", "started", "turns", "task", "stop")
"""on a terminal that is too narrow for all, in this order"""
_PIPED = 200


@click.group("log")
def command() -> None:
    """Look at the log of runs, and move runs in and out of it."""


command.add_command(log_export.command)
command.add_command(log_import.command)
command.add_command(log_verify.command)


@command.command("list")
@click.option("-n", "limit", type=click.IntRange(1), default=20, show_default=True, help="Newest runs shown.")
@_LOG
@_JSON
def list_runs(limit: int, log: str | None, as_json: bool) -> int:
    """The newest runs, a line each."""
    runs = LogStore.open(log, create=False).runs(limit=limit)
    if as_json:
        print(json.dumps([run.model_dump(mode="json") for run in runs]))
        return 0
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
    return 0


def _columns(width: int) -> list[str]:
    """The columns that fit; the run and its reward stay at any width."""
    columns = list(_WIDTHS)
    for name in _LEFT_OUT:
        if sum(_WIDTHS[column] + 2 for column in columns) <= width:
            break
        columns.remove(name)
    return columns


@command.command("show")
@click.argument("run")
@click.option("-v", "--verbose", is_flag=True, help="Print long outputs whole on a terminal.")
@_LOG
@_JSON
def show(run: str, verbose: bool, log: str | None, as_json: bool) -> int:
    """One run whole: the task, each step, the diff, the verdict."""
    trajectory = LogStore.open(log, create=False).get(run)
    if as_json:
        print(json.dumps(trajectory.model_dump(mode="json")))  # which can spell any text
        return 0
    display = Display(quiet=False, verbose=verbose)
    display.start(trajectory)
    print(printable(trajectory.task.prompt))
    for turn in trajectory.turns:
        display.turn(turn)
    display.end(trajectory, applied=True)
    return 0


@command.command("redact")
@click.argument("runs", nargs=-1, required=True)
@_LOG
def redact(runs: tuple[str, ...], log: str | None) -> int:
    """Take the secrets out of RUNS for good: what they held before is dropped, not kept beside it.

    The rules are those of `redact` in nano.toml. All token ids of a run that held a secret become
    placeholders: it trains no policy gradient any more. Snapshots of workspaces stay as they are.
    """
    redactor = Redactor(load_config({}, Path())[0].redact)
    with LogStore.open(log, create=False) as store:
        for run in runs:
            changed = redact_run(store, store.resolve(run), redactor)
            print(f"run {store.resolve(run)}: {'redacted' if changed else 'nothing to redact'}")
    return 0


@command.command("path")
@_LOG
def path(log: str | None) -> int:
    """Where the log is."""
    print(LogStore.open(log).url)
    return 0
