"""`nano-rl tasks`: make, check and list tasks, or take them from logged runs."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, open_log
from nano_rl.commands.options import Log, Seed, TaskFile
from nano_rl.tasks.suite import TaskSuite, find_suite, suite_names
from nano_rl.tasks.task_file import draw_tasks, read_tasks, refuse_unwritable, write_tasks
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extensions import is_reference, missing_plugin
from nano_shared.printable import printable
from nano_shared.types import Split, Task

if TYPE_CHECKING:
    from nano_rl.tasks.check import TaskFinding
    from nano_rl.tasks.from_log import LoggedTask


def make(
    suite: Annotated[str, Option(help="See nano-rl tasks list --suites.")] = "functions",
    levels: Annotated[
        str, Option("--level", help="One level, or a range such as 0-3; else those of the suite up to 3.")
    ] = "",
    views: Annotated[
        list[str] | None,
        Option("--view", help="Views, separated by commas or given apart; else all of the levels."),
    ] = None,
    n: Annotated[int, Option("-n", min=1, help="Number of tasks.")] = 200,
    seed: Seed = 0,
    split: Annotated[Split, Option(help="Of the program families.")] = Split.TRAIN,
    out: Annotated[Path | None, Option(help="File; default from the options.")] = None,
    check: Annotated[
        bool, Option("--check", help="Draw until N tasks are admitted, as by nano-rl tasks check.")
    ] = False,
) -> int:
    """Make N tasks into a JSON lines file. Train and test share no program family."""
    supply = find_suite(suite)
    chosen = parse_levels(levels) if levels else _usual_levels(supply)
    levels = levels or f"{chosen[0]}-{chosen[-1]}"
    drawn = draw_tasks(
        suite=suite,
        levels=chosen,
        seed=seed,
        split=split,
        views=tuple(view for named in views or () for view in named.split(",")),
    )
    name = supply.name if is_reference(suite) else suite
    target = out or Path(f"{name}-{levels}-{split}-{seed}.jsonl")
    refuse_unwritable(target)
    tasks = _admitted(drawn, n) if check else list(itertools.islice(drawn, n))
    write_tasks(target, tasks)
    if len(tasks) > 1 and len({task.program_hash or task.key for task in tasks}) == 1:
        print(
            f"all {len(tasks)} tasks are of one program, so that results on them have no interval; another"
            " --level, --view or --split has more programs",
            file=sys.stderr,
        )
    print(target)
    return 0


def _admitted(drawn: Iterator[Task], n: int) -> list[Task]:
    from nano_rl.commands.progress import bar
    from nano_rl.tasks.check import admitted_tasks

    with bar("admitted", n) as progress:
        tasks, findings = admitted_tasks(
            drawn, n, on_task=lambda found: progress.advance() if found.admitted else None
        )
    print_findings(findings)
    return tasks


def _usual_levels(suite: TaskSuite) -> tuple[int, ...]:
    known = sorted({view.level for view in suite.views})
    return tuple(level for level in known if level <= 3) or tuple(known)


def parse_levels(text: str) -> tuple[int, ...]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(f"--level {text!r} is neither a level nor a range such as 0-3")
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1))


SHOWN = 20
"""refused tasks that the report names"""


def check(
    file: TaskFile,
    out: Annotated[Path | None, Option(help="Write the admitted tasks to this file.")] = None,
    against: Annotated[
        list[Path] | None,
        Option(help="A task file whose programs must not occur, as the held-out tasks; repeatable."),
    ] = None,
    as_json: JsonOption = False,
    log: Log = None,
) -> int:
    """Run every task's oracle, starter and mutants. Exit code 1 where a task is refused and no --out takes
    the others, or where none is admitted."""
    from nano_coder.grading import GRADER
    from nano_rl.commands.progress import bar
    from nano_rl.session import sandbox_opener
    from nano_rl.tasks.check import check_tasks, programs_of, without_repeats

    tasks = read_tasks(file)
    others: dict[str, str] = {}
    for other in against or ():
        others |= programs_of(read_tasks(other), other.name)
    if out is not None:
        refuse_unwritable(out)
    borrowed = any(task.snapshot for task in tasks)  # their files lie in the log that they were made from
    blobs = open_log(log).blobs.address if borrowed else None
    findings, admitted = [], []
    with bar("checked", len(tasks)) as progress:
        jobs = min(os.cpu_count() or 1, len(tasks))
        found = check_tasks(tasks, jobs=jobs, blobs=blobs, opener=sandbox_opener())
        for task, finding in without_repeats(found, others=others):
            findings.append(finding)
            if finding.admitted:
                origin = task.provenance.model_copy(update={"checked": GRADER})
                admitted.append(task.model_copy(update={"provenance": origin}))
            progress.advance()
    if out is not None and admitted:
        write_tasks(out, admitted)
    rows = [finding.as_json() for finding in findings]
    report = {"tasks": len(tasks), "admitted": len(admitted), "findings": rows}
    emit(report, as_json, lambda: print_findings(findings))
    if out is not None and not as_json:
        print(out if admitted else f"{out} is not written: no task is admitted")
    return int(not admitted if out is not None else len(admitted) < len(tasks))


def print_findings(findings: Sequence[TaskFinding]) -> None:
    console = Console(width=160) if not Console().is_terminal else Console()
    groups: dict[tuple[str, str], list[TaskFinding]] = defaultdict(list)
    for finding in findings:
        level = "-" if finding.level is None else str(finding.level)
        groups[level, finding.view or "-"].append(finding)
    table = Table("level", "view", "tasks", "admitted", "mutants killed", "seconds a task", box=None)
    for (level, view), members in sorted(groups.items()):
        rates = [m.kill_rate for m in members if m.kill_rate is not None]
        table.add_row(
            level, view, str(len(members)), str(sum(m.admitted for m in members)),
            f"{sum(rates) / len(rates):.1%}" if rates else "no program",
            f"{sum(m.seconds for m in members) / len(members):.2f}",
        )  # fmt: skip
    console.print(table)
    refused = [finding for finding in findings if not finding.admitted]
    for finding in refused[:SHOWN]:
        console.print(f"refused {finding.key}: {'; '.join(finding.reasons)}", soft_wrap=True)
    if len(refused) > SHOWN:
        console.print(f"and {len(refused) - SHOWN} more refused; --json names them all")
    console.print(f"{len(findings) - len(refused)} of {len(findings)} tasks admitted")


def list_tasks(
    file: Annotated[Path | None, Argument(metavar="FILE", help="JSON lines of tasks.")] = None,
    suites: Annotated[bool, Option("--suites", help="Every suite with its levels and views.")] = False,
    as_json: JsonOption = False,
) -> int:
    """What is in a task file: tasks by level, view and split. With --suites: what can be made."""
    if suites == (file is not None):
        raise UsageError("name a task file, or give --suites to see what can be made")
    if suites and not suite_names():
        raise missing_plugin("what can be made", "suites")
    rows, broken = _suite_rows() if file is None else (_task_rows(file), [])
    for problem in broken:
        print(f"error: {problem}", file=sys.stderr)
    code = broken[0].exit_code if broken else 0
    columns = ("suite", "level", "views", "about") if file is None else ("level", "view", "split", "tasks")
    emit(rows, as_json, lambda: _show_rows(rows, columns))
    return code


def _show_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    table = Table(*columns, box=None)
    described = None
    for row in rows:
        if "suite" in row and row["suite"] == described:
            row |= {"suite": "", "about": ""}
        else:
            described = row.get("suite")
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)


def _task_rows(file: Path) -> list[dict[str, Any]]:
    counts = Counter((task.level, task.view, task.split) for task in read_tasks(file))
    return [
        {"level": level, "view": view, "split": split, "tasks": count}
        for (level, view, split), count in sorted(counts.items(), key=str)
    ]


def _suite_rows() -> tuple[list[dict[str, Any]], list[ConfigError]]:
    """The rows of all suites that can be loaded, and why others cannot."""
    rows: list[dict[str, Any]] = []
    broken: list[ConfigError] = []
    for name in suite_names():
        try:
            suite = find_suite(name)
        except ConfigError as problem:
            broken.append(problem)
            continue
        for level in sorted({view.level for view in suite.views}):
            named = (v.name + (" (by name only)" if v.extra else "") for v in suite.views if v.level == level)
            rows.append({"suite": name, "level": level, "views": ", ".join(named), "about": suite.about})
    return rows, broken


def from_log(
    runs: Annotated[list[str], Argument(metavar="RUN")],
    check: Annotated[
        str | None, Option(help="Shell line that grades the task and that no agent sees; else the run's own.")
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="File of the rows; else they go to standard output.")
    ] = None,
    mutants: Annotated[
        int, Option(min=0, help="Also so many tasks that change a line of what passing runs left.")
    ] = 0,
    seed: Seed = 0,
    as_json: JsonOption = False,
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Make a task of each RUN (an id, the beginning of one, or `last`).

    The task begins in the workspace that the run began in. --check is run in a fresh jail on those files plus
    what an agent changed, with tests and configuration as they were. A run that passes gives the oracle; of a
    mutant, on which the check must fail, the oracle is the line put back.
    """
    from nano_coder.verify.trainable import RefusalCode
    from nano_rl.session import sandbox_opener
    from nano_rl.tasks.from_log import distinct, mutant_tasks, task_from_run

    if check is not None and not check.strip():
        raise UsageError("--check is empty; give a shell line, or leave it out to keep the run's own check")
    if as_json and out is None:
        raise UsageError("--json prints what was made, so the rows need a file: name one with -o")
    store = open_log(log, directory)
    chosen = [store.get(run) for run in runs]
    if kept := next((run for run in chosen if store.withholds(run)), None):
        raise UsageError(f"run {kept.id} of {kept.owner}: {RefusalCode.NO_CONSENT.meaning}")
    sandbox = sandbox_opener()()
    if out is not None:
        refuse_unwritable(out)
    every = [task_from_run(run, store.blobs, sandbox, check) for run in chosen]
    made = distinct(every)
    tasks = [logged.task for logged in made]
    lines: list[str] = []
    if mutants:
        both = zip(chosen, every, strict=True)
        passed = [run.model_copy(update={"task": of.task}) for run, of in both if of.reward == 1]
        more, report = mutant_tasks(passed, mutants, store.blobs, sandbox, seed=seed)
        tasks, lines = tasks + more, [report]
    if out is None:
        for task in tasks:
            print(task.model_dump_json(exclude_defaults=True))
    else:
        write_tasks(out, tasks)
    for logged in made:
        solved = _solved(logged)
        where = "" if logged.portable else "; its files stay in the blobs of this log"
        lines.append(
            f"{logged.task.key} from run {logged.run}: trust {logged.trust},"
            f" reward {logged.reward}; {solved}{where}"
        )
    made_rows = [
        {
            "key": m.task.key, "run": m.run, "trust": m.trust, "reward": m.reward,
            "oracle": m.task.oracle is not None, "portable": m.portable, "failure_kind": m.failure_kind,
        }
        for m in made
    ]  # fmt: skip
    report_stream = sys.stderr if out is None else sys.stdout
    emit(
        {"tasks": made_rows, "mutants": len(tasks) - len(made), "file": str(out)},
        as_json,
        lambda: print(printable("\n".join(lines)), file=report_stream),
    )
    return 0


def _solved(logged: LoggedTask) -> str:
    if logged.reward == 1:
        return "the run solves it"
    if logged.task.oracle:
        return "its own oracle solves it, the run does not"
    if logged.failure_kind == "check_not_found":
        return (
            "no run is known to solve it; the check names a program that is not there, try it with"
            " nano-coder exec"
        )
    return "no run is known to solve it"
