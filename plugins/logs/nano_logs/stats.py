"""`nano-coder log stats`: what became of your runs, and what they cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import sqlalchemy as sa
from rich.table import Column, Table
from sqlalchemy.dialects.postgresql import JSON
from typer import Option

from nano_coder.commands.options import Log, open_log
from nano_coder.models.opening import MODELS
from nano_shared import schema
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.owners import User
from nano_shared.printable import printable


class By(StrEnum):
    WEEK = "week"
    MODEL = "model"
    PROJECT = "project"
    OWNER = "owner"


@dataclass(slots=True)
class RunStats:
    """Runs that have something in common; those with a verdict are solved or failed."""

    name: str
    runs: int = 0
    solved_locally: int = 0
    solved_by_escalation: int = 0
    """by a hosted model that went on where a local one had failed"""
    solved_hosted: int = 0
    """by a hosted model from the beginning"""
    failed: int = 0
    dollars: float = 0.0
    dollars_not_spent: float | None = None
    """what the local successes would have cost at the mean price of an escalation; None: nobody knows it"""
    tokens: int = 0
    """read and sampled"""
    hours: float = 0.0
    """of all runs, also where they were side by side"""

    def add(self, run: Any) -> None:
        self.runs += 1
        self.tokens += int(run.tokens or 0)
        self.dollars += run.cost or 0.0
        self.hours += max(0.0, (run.ended or run.started) - run.started) / 3600
        if run.reward is None:
            return
        if run.reward < 1:
            self.failed += 1
        elif is_escalation(run):
            self.solved_by_escalation += 1
        elif is_hosted(run.policy):
            self.solved_hosted += 1
        else:
            self.solved_locally += 1


def is_hosted(policy: str) -> bool:
    scheme, colon, _ = policy.partition(":")
    return bool(colon) and scheme in MODELS


def is_escalation(run: Any) -> bool:
    """Whether a hosted model went on where another model had stopped (`run --escalate`)."""
    return run.parent_policy not in (None, run.policy) and is_hosted(run.policy)


def stats(
    by: Annotated[By | None, Option(help="A line for each of these.")] = None,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Your runs in directories: solved locally, by escalation to a hosted model, or failed; dollars, tokens,
    hours. Rollouts and evaluations do not count.

    Dollars not spent are what the local successes would have cost at the mean price of an escalation.
    --by owner counts the runs of everybody who shares them.
    """
    with open_log(log) as store:
        found = store.read(lambda connection: tally(facts(connection, store.user, by), by))
    emit(found if by else found[0], as_json, lambda: _show(found))
    return 0


def facts(connection: sa.Connection, user: User | None, by: By | None) -> Iterable[Any]:
    """A row for each run, without texts."""
    runs, verdicts, turns = schema.runs, schema.verdicts, schema.turns.c
    parent, later = runs.alias(), verdicts.alias()
    newest = sa.select(sa.func.max(later.c.id)).where(later.c.run_id == runs.c.id).correlate(runs)
    said = ("prompt", "completion", "cost")
    prompt, completion, cost = (_usage(connection, name) for name in said)
    read = sa.func.coalesce(turns.context_tokens, prompt, 0)
    sampled = sa.func.coalesce(turns.sampled_tokens, completion, 0)
    sums = sa.func.sum(read + sampled).label("tokens"), sa.func.sum(cost).label("cost")
    own = sa.select(turns.run_id, *sums)
    own = own.join_from(schema.turns, runs).where(turns.turn >= sa.func.coalesce(runs.c.parent_step, 0))
    used = own.group_by(turns.run_id).subquery()
    columns = (runs.c[name] for name in ("started", "ended", "policy", "project", "directory", "owner"))
    query = (
        sa.select(
            *columns, parent.c.policy.label("parent_policy"), verdicts.c.reward, used.c.tokens, used.c.cost
        )
        .outerjoin_from(runs, parent, parent.c.id == runs.c.parent)
        .outerjoin(verdicts, verdicts.c.id == newest.scalar_subquery())
        .outerjoin(used, used.c.run_id == runs.c.id)
        .where(runs.c.directory.is_not(None))  # no rollouts and evaluations
        .order_by(runs.c.started, runs.c.id)
    )  # fmt: skip
    if user is not None:
        query = query.where(user.sees(runs.c) if by is By.OWNER else user.made(runs.c))
    return connection.execute(query)


def _usage(connection: sa.Connection, name: str) -> sa.ColumnElement[Any]:
    """SQL: a number of what an API says it used for a turn."""
    api = sa.type_coerce(schema.turns.c.api, sa.Text)
    if connection.dialect.name == "sqlite":
        return sa.func.json_extract(api, f"$.usage.{name}")
    return sa.cast(sa.cast(api, JSON)[("usage", name)].astext, sa.Double)


def tally(runs: Iterable[Any], by: By | None) -> list[RunStats]:
    """The runs by what they have in common, in the order of the newest of each; one of none without `by`."""
    groups: dict[Any, RunStats] = {} if by else {None: RunStats("all")}
    prices: list[float] = []
    for run in runs:
        key, name = _group(run, by)
        group = groups.pop(key, None) or RunStats(name)
        groups[key] = group
        group.name = name
        group.add(run)
        if run.cost is not None and is_escalation(run):
            prices.append(run.cost)
    for group in groups.values():
        group.dollars_not_spent = group.solved_locally * sum(prices) / len(prices) if prices else None
    return list(groups.values())


def _group(run: Any, by: By | None) -> tuple[Any, str]:
    """What the run is counted under, and how that is shown."""
    if by is By.PROJECT:  # named by where it lies now
        return run.project or run.directory, run.directory or "none"
    if by is By.OWNER:
        return run.owner, run.owner or "nobody"
    name = run.policy if by is By.MODEL else time.strftime("%G-W%V", time.localtime(run.started))
    return (name, name) if by else (None, "all")


def _show(rows: Sequence[RunStats]) -> None:
    names = "runs", "local", "escalated", "hosted", "failed", "dollars", "not spent", "tokens", "hours"
    columns = (Column(name, no_wrap=True, justify="right") for name in names)
    table = Table(Column("", overflow="fold"), *columns, box=None)
    for row in rows:
        spared = "unknown" if row.dollars_not_spent is None else f"{row.dollars_not_spent:.2f}"
        counts = row.runs, row.solved_locally, row.solved_by_escalation, row.solved_hosted, row.failed
        spent = f"{row.dollars:.2f}", spared, f"{row.tokens:,}", f"{row.hours:.1f}"
        table.add_row(printable(row.name), *map(str, counts), *spent)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
