"""`nano-rl tasks mine`: tasks out of Python packages that have tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument, Option

from nano_coder.commands.options import open_log
from nano_rl.commands.options import Log, Seed
from nano_rl.tasks.task_file import refuse_unwritable, write_tasks
from nano_shared.command_line import Console
from nano_shared.errors import UsageError
from nano_shared.printable import printable

if TYPE_CHECKING:
    from nano_mining.mining import PackageYield, ReleaseYield
    from nano_mining.packages import MinedPackage
    from nano_mining.releases import ReleasePair


def command(
    sources: Annotated[
        list[Path] | None,
        Argument(metavar="DIR|SDIST", help="Folders of packages, or their .tar.gz with tests."),
    ] = None,
    out: Annotated[
        Path, Option(help="File of the tasks; beside it, FILE.journal keeps what is done.")
    ] = Path("mined.jsonl"),
    releases: Annotated[
        list[str] | None,
        Option(metavar="PACKAGE", help="Fixes between a package's releases; repeatable."),
    ] = None,
    kind: Annotated[
        list[str] | None, Option(help="bug, body or code, repeatable or with commas; else all.")
    ] = None,
    bugs: Annotated[int, Option(min=1, help="Bugs planted in one function, at most.")] = 3,
    seed: Seed = 0,
    workers: Annotated[
        int | None, Option(min=1, help="Jails at a time.", show_default="one a processor")
    ] = None,
    report: Annotated[Path | None, Option(help="JSON of what each package gave.")] = None,
    log: Log = None,
) -> int:
    """Make tasks of the functions and classes that a package's tests call, or of its releases.

    A bug is planted, a body is removed, or a whole definition. With --releases, the tests of each release
    run on the one before it, and the smallest part of the change that mends a test is the oracle. A task is
    kept if its checks fail as it stands and pass on its oracle's work; the package's code runs in jails
    alone. A source that is no package with tests is named and skipped; the exit code is then 1. Ctrl-C writes
    what is there; the same command goes on after that, and after a kill.
    """
    from nano_mining.candidates import KINDS
    from nano_mining.mining import Miner, MiningJournal, StoppableSandbox
    from nano_rl.command_setup import sandbox_opener
    from nano_rl.commands.progress import bar

    kinds = tuple(word for given in kind or [",".join(KINDS)] for word in given.split(","))
    if unknown := [word for word in kinds if word not in KINDS]:
        raise UsageError(f"unknown kind {unknown[0]!r}; kinds: {', '.join(KINDS)}")
    if bool(sources) == bool(releases):
        raise UsageError("name either folders and .tar.gz files of packages, or packages by --releases")
    pairs = _pairs(releases or [])
    packages = _packages(sources) if sources else []
    for path in (out, report):
        if path is not None:
            refuse_unwritable(path)
    journal = MiningJournal(out.with_name(f"{out.name}.journal"))
    with closing(journal), bar("mining", 1) as progress:
        miner = Miner(
            store=open_log(log, create=True).blobs, sandbox=StoppableSandbox(sandbox_opener()()),
            journal=journal, kinds=kinds, bugs=bugs, seed=seed, workers=workers or os.cpu_count() or 1,
            on_progress=progress.reach,
        )  # fmt: skip
        tasks, yields = miner.mine_releases(pairs) if releases else miner.mine(packages)
    write_tasks(out, tasks)
    if report is not None:
        rows = [found.as_json() for found in yields]
        report.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    _print(yields, kinds)
    print(f"{len(tasks)} tasks in {out}; their workspaces are in the blobs of this log")
    if miner.interrupted:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return int(not tasks or len(packages) < len(sources or ()))


def _pairs(names: Sequence[str]) -> list[ReleasePair]:
    from nano_mining.releases import pairs_of, releases_of

    return [pair for name in names for pair in pairs_of(releases_of(name), len(names) == 1)]


def _packages(sources: Sequence[Path]) -> list[MinedPackage]:
    """The packages; those that cannot be mined are named and skipped. Raises UsageError if all are."""
    from nano_mining.packages import read_package

    packages = []
    for source in sources:
        try:
            packages.append(read_package(source))
        except UsageError as problem:
            if len(sources) == 1:
                raise
            print(printable(f"skipped: {problem}"), file=sys.stderr)
    if not packages:
        none = f"none of the {len(sources)} sources can be mined"
        raise UsageError(f"{none}: name packages with modules and tests")
    return packages


def _print(yields: Sequence[PackageYield] | Sequence[ReleaseYield], kinds: Sequence[str]) -> None:
    from nano_mining.mining import ReleaseYield

    console = Console(width=160) if not Console().is_terminal else Console()
    table = Table("package", "licence", "functions", "called", "repeated", *kinds, "refused", box=None)
    for found in yields:
        if isinstance(found, ReleaseYield):
            console.print(printable(str(found), None), highlight=False, soft_wrap=True)
            continue
        counts = (found.functions, found.called, found.repeated, *(found.tasks[kind] for kind in kinds))
        refused = found.refused.total()
        table.add_row(found.origin, found.licence or "unknown", *map(str, counts), str(refused))
    if table.row_count:
        console.print(table)
