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
from nano_shared import schema
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.extension_points import is_hosted
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

    def add(self, some: Any) -> None:
        """Add runs of one policy, parent's policy and outcome."""
        self.runs += some.runs
        self.hours += (some.seconds or 0.0) / 3600
        if some.passed is None:
            return
        if not some.passed:
            self.failed += some.runs
        elif is_escalation(some):
            self.solved_by_escalation += some.runs
        elif is_hosted(some.policy):
            self.solved_hosted += some.runs
        else:
            self.solved_locally += some.runs


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
        found = store.read(lambda connection: tally(connection, store.user, by))
    emit(found if by else found[0], as_json, lambda: _show(found))
    return 0


def tally(connection: sa.Connection, user: User | None, by: By | None) -> list[RunStats]:
    """The runs by what they have in common, in the order of the newest of each; one of none without `by`.

    The database adds up: turns are read once, and no row is that of a run but where it has a parent.
    """
    groups: dict[Any, RunStats] = {} if by else {None: RunStats("all")}
    for some in _counted(connection, user, by):
        key, name = _group(some, by)
        group = groups.pop(key, None) or RunStats(name)
        groups[key] = group
        group.name = name
        group.add(some)
    prices: list[float] = []
    for some in _used(connection, user, by):
        group = groups[_group(some, by)[0]]
        group.tokens += int(some.tokens or 0)
        group.dollars += some.cost or 0.0
        if some.cost is not None and is_escalation(some):
            prices.append(some.cost)
    for group in groups.values():
        group.dollars_not_spent = group.solved_locally * sum(prices) / len(prices) if prices else None
    return list(groups.values())


def _counted(connection: sa.Connection, user: User | None, by: By | None) -> Iterable[Any]:
    """Runs and their seconds by policies and outcome, those with the oldest last run first."""
    runs, verdicts = schema.runs.c, schema.verdicts
    later = verdicts.alias()
    newest = sa.select(sa.func.max(later.c.id)).where(later.c.run_id == runs.id).correlate(schema.runs)
    reward = verdicts.c.reward
    # no parameters in a key: Postgres takes two for different ones
    no, yes = (sa.literal_column(number, sa.Integer) for number in "01")
    passed = sa.case((reward < yes, no), (reward >= yes, yes)).label("passed")
    seconds = sa.func.sum(sa.case((runs.ended > runs.started, runs.ended - runs.started), else_=0.0))
    last = sa.func.max(runs.started)
    query = _grouped(
        connection, user, by, passed, sums=(sa.func.count().label("runs"), seconds.label("seconds"))
    )
    query = query.outerjoin(verdicts, verdicts.c.id == newest.scalar_subquery())
    return connection.execute(query.order_by(last, sa.func.max(runs.id)))


def _used(connection: sa.Connection, user: User | None, by: By | None) -> Iterable[Any]:
    """Tokens and dollars by policies; of a run that has a parent by itself, since it may be an escalation."""
    runs, turns = schema.runs.c, schema.turns.c
    prompt, completion, cost = (_usage(connection, name) for name in ("prompt", "completion", "cost"))
    read = sa.func.coalesce(turns.context_tokens, prompt, 0)
    sampled = sa.func.coalesce(turns.sampled_tokens, completion, 0)
    sums = sa.func.sum(read + sampled).label("tokens"), sa.func.sum(cost).label("cost")
    alone = sa.case((runs.parent.is_not(None), runs.id)).label("alone")
    own = (turns.run_id == runs.id) & (turns.turn >= sa.func.coalesce(runs.parent_step, 0))
    return connection.execute(_grouped(connection, user, by, alone, sums=sums).join(schema.turns, own))


def _grouped(
    connection: sa.Connection, user: User | None, by: By | None, of: sa.Label[Any], *, sums: Sequence[Any]
) -> sa.Select[Any]:
    """SQL: sums over the runs of directories that the user sees, by both policies, `of`, and what `by` asks
    for."""
    runs, parent = schema.runs.c, schema.runs.alias()
    keys = [runs.policy, parent.c.policy.label("parent_policy"), of, *_keys(connection, by)]
    query = (
        sa.select(*keys, sa.func.max(runs.started).label("started"), *sums)
        .select_from(schema.runs)
        .outerjoin(parent, parent.c.id == runs.parent)
        .where(runs.directory.is_not(None))  # no rollouts and evaluations
        .group_by(*keys)
    )
    if user is None:
        return query
    return query.where(user.sees(runs) if by is By.OWNER else user.made(runs))


def _keys(connection: sa.Connection, by: By | None) -> list[Any]:
    runs = schema.runs.c
    match by:
        case By.WEEK:  # which begins at a quarter of an hour in any time zone
            whole = runs.started if connection.dialect.name == "sqlite" else sa.func.floor(runs.started)
            return [(sa.cast(whole, sa.BigInteger) // sa.literal_column("900", sa.Integer)).label("quarter")]
        case By.PROJECT:
            return [runs.project, runs.directory]
        case By.OWNER:
            return [runs.owner]
    return []


def _usage(connection: sa.Connection, name: str) -> sa.ColumnElement[Any]:
    """SQL: a number of what an API says it used for a turn."""
    api = sa.type_coerce(schema.turns.c.api, sa.Text)
    if connection.dialect.name == "sqlite":
        return sa.func.json_extract(api, f"$.usage.{name}")
    return sa.cast(sa.cast(api, JSON)[("usage", name)].astext, sa.Double)


def _group(run: Any, by: By | None) -> tuple[Any, str]:
    """What runs are counted under, and how that is shown."""
    match by:
        case By.WEEK:
            week = time.strftime("%G-W%V", time.localtime(run.started))
            return week, week
        case By.MODEL:
            return run.policy, run.policy
        case By.PROJECT:  # named by where it lies now
            return run.project or run.directory, run.directory or "none"
        case By.OWNER:
            return run.owner, run.owner or "nobody"
    return None, "all"


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
