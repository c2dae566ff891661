"""`nano-rl conformance`: the published suite, on our objectives or on anyone's loss function."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nano_shared.command_line import JsonOption
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extension_points import user_module

if TYPE_CHECKING:
    from rich.table import Table

    from nano_conformance.adapter import Subject
    from nano_conformance.case import CheckResult as Result


def command(
    against: Annotated[
        str | None,
        Option(
            metavar="FILE|MODULE:FUNCTION",
            help="A loss of yours instead of ours, `loss` where no FUNCTION is named, with `advantages` and"
            " others beside it (nano_conformance/adapter.py).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Closed forms, a grid of settings against plain loops, exact gradients and invariances.

    All in float64. One line says what each failure is, a table which objectives and settings were tried. Ends
    with 1 where a criterion fails. What a loss answers with NotImplementedError is not offered, and counts
    neither way.
    """
    from nano_conformance.adapter import OURS
    from nano_conformance.suite import run_suite

    subject = _load(against) if against else OURS
    results = list(run_suite(subject))
    failed = sum(result.status == "failed" for _, result in results)
    if as_json:
        print(json.dumps({"subject": subject.name, "results": [_plain(k, r) for k, r in results]}, indent=1))
    else:
        _show(subject.name, results)
    if against and all(result.status == "not offered" for _, result in results):
        raise UsageError(
            f"{against} answers everything with NotImplementedError, so nothing was checked; let it compute"
            " the losses that it has (nano_conformance/adapter.py)"
        )
    return 1 if failed else 0


def _load(against: str) -> Subject:
    from nano_conformance.adapter import CREDIT, Subject

    name, function = against, "loss"
    if not against.endswith(".py"):
        name, _, given = against.partition(".py:") if ".py:" in against else against.partition(":")
        name, function = name + ".py" * (".py:" in against), given or "loss"
    if not name:
        raise UsageError(f"--against {against!r} names no module; give FILE.py or MODULE:FUNCTION")
    try:
        module = user_module(name)
    except ConfigError as problem:
        raise UsageError(f"{problem}; give a file, or a module found from here, as MODULE:FUNCTION") from None
    loss = getattr(module, function, None)
    if not callable(loss):
        raise UsageError(
            f"{name} has no function {function!r}; name one that takes (logprobs, old, behaviour, reference,"
            " advantages, mask, options)"
        )
    beside = {name: found for name in CREDIT if callable(found := getattr(module, name, None))}
    return Subject(name=against, loss=loss, credit=beside)


def _plain(kind: str, result: Result) -> dict[str, Any]:
    finite = result.error is not None and math.isfinite(result.error)
    return {
        "kind": kind, "criterion": result.criterion, "name": result.name, "status": str(result.status),
        "error": result.error if finite else None, "tolerance": result.tolerance, "note": result.note,
        "cases": result.compared,
    }  # fmt: skip


def _show(subject: str, results: list[tuple[str, Result]]) -> None:
    from nano_conformance.suite import NOT_COVERED
    from nano_shared.command_line import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_kinds(subject, results), _coverage(results), sep="\n")
    console.print(f"Not covered: {NOT_COVERED}.\n")
    for kind, r in results:
        if r.status == "failed":
            line = f"FAILED {r.criterion} {kind}, {r.name}: {r.note}"
            console.print(line, soft_wrap=True)
    console.print(", ".join(f"{_count(results, s)} {s}" for s in STATUSES))


STATUSES = ("passed", "failed", "not offered")


def _count(results: list[tuple[str, Result]], status: str) -> int:
    return sum(r.status == status for _, r in results)


def _kinds(subject: str, results: list[tuple[str, Result]]) -> Table:
    from rich.table import Table

    table = Table(title=f"{subject} against the suite", show_edge=False)
    for column in ("checks", *STATUSES, "cases", "off by at most"):
        table.add_column(column, justify="left" if column == "checks" else "right")
    for kind in dict.fromkeys(kind for kind, _ in results):
        of = [(k, r) for k, r in results if k == kind]
        errors = [r.error for _, r in of if r.error is not None]
        worst = max(errors, default=None, key=lambda e: math.inf if math.isnan(e) else e)
        counts = [str(_count(of, status)) for status in STATUSES]
        cases = str(sum(r.compared for _, r in of))
        table.add_row(kind, *counts, cases, "" if worst is None else f"{worst:.1e}")
    return table


def _coverage(results: list[tuple[str, Result]]) -> Table:
    """Cases of the grid: objective x importance weights, and x what has moved; each with every KL, clip,
    rejection and aggregation of that objective."""
    from rich.table import Table

    cells: dict[str, dict[str, str]] = {}
    for kind, r in results:
        if kind == "grid":
            objective, _, setting = r.name.rpartition(": ")
            shown = "FAILED" if r.status == "failed" else str(r.compared or "-")
            cells.setdefault(objective, {})[setting] = shown
    settings = list(dict.fromkeys(setting for of in cells.values() for setting in of))
    table = Table(title="cases of the grid", show_edge=False)
    table.add_column("")
    for setting in settings:
        table.add_column(setting, justify="right")
    for objective, of in cells.items():
        table.add_row(objective, *(of[setting] for setting in settings))
    return table
