"""`nano-rl conformance`: the published suite, on our objectives or on anyone's loss function."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from nano_shared.errors import UsageError

if TYPE_CHECKING:
    from nano_rl.conformance.adapter import Subject
    from nano_rl.conformance.check import Result


@click.command("conformance")
@click.option(
    "--against",
    metavar="MODULE[:FUNCTION]",
    help="A loss of yours instead of ours; FUNCTION is `loss` by default, and `advantages` is read beside it."
    " nano_rl/conformance/adapter.py says what is asked of it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
def command(against: str | None, as_json: bool) -> int:
    """Closed forms, finite differences, exact gradients and invariances, all in float64.

    Ends with 1 where a criterion fails. What a loss answers with NotImplementedError is not offered, and
    counts neither way.
    """
    from nano_rl.conformance.adapter import OURS
    from nano_rl.conformance.suite import run_suite

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
            " the losses that it has (nano_rl/conformance/adapter.py)"
        )
    return 1 if failed else 0


def _load(against: str) -> Subject:
    import importlib

    from nano_rl.conformance.adapter import Subject

    name, _, function = against.partition(":")
    function = function or "loss"
    # as `python -m` does: a module beside the user is found
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise UsageError(
            f"{name!r} cannot be imported ({error}); give a module that Python finds from here, as"
            " MODULE:FUNCTION"
        ) from error
    finally:
        sys.path.remove("")
    loss = getattr(module, function, None)
    if not callable(loss):
        raise UsageError(
            f"{name} has no function {function!r}; name one that takes (logprobs, old, behaviour, reference,"
            " advantages, mask, options)"
        )
    return Subject(name=against, loss=loss, advantages=getattr(module, "advantages", None))


def _plain(kind: str, result: Result) -> dict[str, Any]:
    finite = result.error is not None and math.isfinite(result.error)
    return {
        "kind": kind, "criterion": result.criterion, "name": result.name, "status": str(result.status),
        "error": result.error if finite else None, "tolerance": result.tolerance, "note": result.note,
    }  # fmt: skip


def _show(subject: str, results: list[tuple[str, Result]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title=f"{subject} against the suite", show_edge=False)
    for column in ("criterion", "check", "", "off by", "note"):
        table.add_column(column, justify="right" if column == "off by" else "left")
    shown = {"passed": "[green]passed", "failed": "[red]FAILED", "not offered": "[dim]not offered"}
    kind = ""
    for of, r in results:
        if of != kind:
            table.add_section()
            table.add_row("", f"[bold]{of}")
            kind = of
        table.add_row(
            r.criterion, r.name, shown[r.status], "" if r.error is None else f"{r.error:.1e}", r.note
        )
    console.print(table)
    counts = {s: sum(r.status == s for _, r in results) for s in shown}
    console.print(", ".join(f"{n} {s}" for s, n in counts.items()))
