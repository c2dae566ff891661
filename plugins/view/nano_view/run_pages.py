"""Pages of runs and of groups, newest first, by keyset; and the tree of forks that a run belongs to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import sqlalchemy as sa

from nano_shared import schema
from nano_shared.schema import ESCAPED, ExactText
from nano_shared.store import LogStore
from nano_shared.types import Value

Cursor = tuple[float | str | int, ...]
"""place of the last row of a page"""
RewardRange = Literal["full", "partial", "zero", "none"]
_SHOWN = 400
"""characters of a text in a row of a page"""
_TREE = 500
"""largest number of runs of one tree"""
_EXACT = ("id", "parent")
_CUT = ("task_key", "policy", "policy_id", "prompt", "stop", "failure_kind", "trust", "family")
_PLAIN = ("parent_step", "reward", "turns", "sampled_tokens", "trainable", "started", "ended", "level")
_runs = sa.table(
    "runs", *(sa.column(name, ExactText) for name in (*_EXACT, "owner", "share")),
    *(sa.column(name, sa.Text) for name in _CUT), *(sa.column(name) for name in _PLAIN),
)  # fmt: skip
# a run without `parent_step` is of a version that did not group forks by their step
_forked_from = sa.case((schema.runs.c.parent_step.is_(None), None), else_=schema.runs.c.parent)


class GroupName(Value):
    """What the runs of a group have in common: their task, and for forks the step that they continue."""

    task: str
    parent: str | None = None
    parent_step: int | None = None


class RunChoice(Value):
    """Selects runs; the default selects all."""

    policy: str | None = None
    """as the user named it, or the id of the weights that sampled the last turn"""
    task: str | None = None
    """part of the task's key"""
    reward: RewardRange | None = None
    """full: at least 1; zero: at most 0; partial: between them; none: without a reward"""
    stop: str | None = None
    """a stop reason, or "unfinished" """
    tokens: bool | None = None
    """whether every turn holds token ids and log-probs"""
    text: str | None = None
    """in the prompt, a completion, or an observation"""
    group: GroupName | None = None


def read_page(
    connection: sa.Connection, chosen: RunChoice, after: Cursor | None, limit: int, order: str = "newest",
    shown: sa.ColumnElement[bool] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the view `runs` after the cursor (started, id), of those that are `shown`; `order` may be
    "best" or "worst" reward. Long texts are cut. Only the order "newest" takes a cursor."""
    columns = [_runs.c[name] for name in (*_EXACT, *_PLAIN)]
    cut = [sa.func.substr(_runs.c[name], 1, _SHOWN).label(name) for name in _CUT]
    ends = {"best": _runs.c.reward.desc(), "worst": _runs.c.reward.asc()}
    query = sa.select(*columns, *cut).where(*_conditions(chosen)).limit(limit)
    if order in ends:
        query = query.where(_runs.c.reward.is_not(None)).order_by(ends[order], _runs.c.id)
    else:
        query = query.order_by(_runs.c.started.desc(), _runs.c.id.desc())
    if shown is not None:
        query = query.where(shown)
    if after is not None:
        place = sa.tuple_(sa.literal(after[0], sa.Double), sa.literal(after[1], ExactText))
        query = query.where(sa.tuple_(_runs.c.started, _runs.c.id) < place)
    return [_row(dict(row)) for row in connection.execute(query).mappings()]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A cut text that was stored as JSON stays in that spelling, without the marker."""
    marked = {name: row[name] for name in _CUT if str(row.get(name)).startswith(ESCAPED)}
    return row | {name: text.removeprefix(ESCAPED).strip('"') for name, text in marked.items()}


def _conditions(chosen: RunChoice) -> list[sa.ColumnElement[bool]]:
    of, found = _runs.c, []
    ranges = {
        "full": of.reward >= 1, "zero": of.reward <= 0, "none": of.reward.is_(None),
        "partial": sa.and_(of.reward > 0, of.reward < 1),
    }  # fmt: skip
    if chosen.policy:
        named = sa.type_coerce(of.policy, ExactText) == chosen.policy
        found.append(sa.or_(named, of.policy_id == chosen.policy))
    if chosen.task:
        found.append(_holds(of.task_key, chosen.task))
    if chosen.reward:
        found.append(ranges[chosen.reward])
    if chosen.stop:
        found.append(of.stop.is_(None) if chosen.stop == "unfinished" else of.stop == chosen.stop)
    if chosen.tokens is not None:
        found.append(of.trainable == int(chosen.tokens))
    if chosen.text:
        found.append(_mentions(chosen.text))
    if chosen.group is not None:
        found.append(sa.type_coerce(of.task_key, ExactText) == chosen.group.task)
        fork = of.parent == chosen.group.parent, of.parent_step == chosen.group.parent_step
        found += fork if chosen.group.parent else [sa.or_(of.parent.is_(None), of.parent_step.is_(None))]
    return found


def _mentions(text: str) -> sa.ColumnElement[bool]:
    """Whether a run's prompt, a completion or an observation holds the text; run by run, newest first."""
    turns, calls = schema.turns.c, schema.tool_calls.c
    return sa.or_(
        _holds(_runs.c.prompt, text),
        sa.exists().where(turns.run_id == _runs.c.id, _holds(turns.text, text)),
        sa.exists().where(calls.run_id == _runs.c.id, _holds(calls.text, text)),
    )


def _holds(column: sa.ColumnElement[Any], part: str) -> sa.ColumnElement[bool]:
    """Whether a text holds a part, as it is or in the spelling of JSON (`schema.ExactText`)."""
    raw = sa.type_coerce(column, sa.Text)
    spellings = dict.fromkeys((part.encode(errors="replace").decode(), json.dumps(part)[1:-1]))
    return sa.or_(*(raw.contains(spelled.replace("\0", ""), autoescape=True) for spelled in spellings))


def read_groups(
    connection: sa.Connection, chosen: RunChoice, after: Cursor | None, limit: int
) -> list[dict[str, Any]]:
    """Groups by their newest run: name, runs, one run, and number, mean, least and largest of the rewards. Of
    `chosen`, policy, task and group apply. The cursor is (newest, task, parent, parent_step)."""
    runs, tasks = schema.runs, schema.tasks
    newest = sa.func.max(runs.c.started)
    place: list[sa.ColumnElement[Any]] = [
        newest, tasks.c.key, sa.func.coalesce(_forked_from, ""), sa.func.coalesce(runs.c.parent_step, -1)
    ]  # fmt: skip
    names = [tasks.c.key.label("task"), _forked_from.label("parent"), runs.c.parent_step]
    counts = (newest.label("newest"), sa.func.count().label("runs"), sa.func.max(runs.c.id).label("of"))
    query = sa.select(*names, *counts).join(tasks)
    query = query.group_by(*names).order_by(*(column.desc() for column in place)).limit(limit)
    if chosen.policy:
        query = query.where(runs.c.policy == chosen.policy)
    if chosen.task:
        query = query.where(_holds(tasks.c.key, chosen.task))
    if chosen.group:
        alike = runs.c.parent == chosen.group.parent, runs.c.parent_step == chosen.group.parent_step
        query = query.where(tasks.c.key == chosen.group.task)
        query = query.where(*alike if chosen.group.parent else (_forked_from.is_(None),))
    if after is not None:
        types: tuple[Any, ...] = (sa.Double(), ExactText(), ExactText(), sa.Integer())
        bound = [sa.literal(value, kind) for value, kind in zip(after, types, strict=True)]
        query = query.having(sa.tuple_(*place) < sa.tuple_(*bound))
    found = [dict(row) for row in connection.execute(query).mappings()]
    rewards = _rewards(connection, sorted({row["task"] for row in found}))
    return [row | rewards[row["task"], row["parent"], row["parent_step"]] for row in found]


def _rewards(connection: sa.Connection, keys: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    runs, tasks, verdicts = schema.runs, schema.tasks, schema.verdicts
    later = verdicts.alias()
    newest = sa.select(sa.func.max(later.c.id)).where(later.c.run_id == runs.c.id).correlate(runs)
    reward = verdicts.c.reward
    names = (tasks.c.key, _forked_from, runs.c.parent_step)
    query = (
        sa.select(
            *names, sa.func.count(reward).label("graded"), sa.func.avg(reward).label("mean"),
            sa.func.min(reward).label("least"), sa.func.max(reward).label("best"),
        )
        .join(tasks, runs.c.task_id == tasks.c.id)
        .outerjoin(verdicts, verdicts.c.id == newest.scalar_subquery())
        .where(tasks.c.key.in_(keys))
        .group_by(*names)
    )  # fmt: skip
    fields = ("graded", "mean", "least", "best")
    return {tuple(row[:3]): dict(zip(fields, row[3:], strict=True)) for row in connection.execute(query)}


def group_of(connection: sa.Connection, run_id: str) -> GroupName | None:
    """The group of a run; None for an unknown run."""
    runs, tasks = schema.runs, schema.tasks
    query = sa.select(tasks.c.key, _forked_from, runs.c.parent_step).join(tasks).where(runs.c.id == run_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else GroupName(task=row[0], parent=row[1], parent_step=row[2])


def newest_version(connection: sa.Connection, policy: str) -> int | None:
    """The policy version in the last turn of the newest run of a policy."""
    runs, turns = schema.runs.c, schema.turns.c
    newest = sa.select(runs.id).where(runs.policy == policy).order_by(runs.started.desc()).limit(1)
    query = sa.select(sa.func.max(turns.policy_version)).where(turns.run_id == newest.scalar_subquery())
    found: int | None = connection.scalar(query)
    return found


def read_tree(connection: sa.Connection, run_id: str) -> list[dict[str, Any]]:
    """The runs of the tree of forks that a run belongs to, oldest first; the run alone if it has no forks."""
    runs = schema.runs
    root, seen = run_id, {run_id}
    while parent := connection.scalar(sa.select(runs.c.parent).where(runs.c.id == root)):
        # an imported log may lack the parent, or name a run as its own ancestor
        if parent in seen or not connection.scalar(sa.select(sa.exists().where(runs.c.id == parent))):
            break
        root = parent
        seen.add(parent)
    below = sa.select(runs.c.id).where(runs.c.id == root).cte("below", recursive=True)
    below = below.union(sa.select(runs.c.id).join(below, runs.c.parent == below.c.id))
    names = ("id", "parent", "parent_step", "policy", "stop", "reward", "turns", "started")
    query = sa.select(*(_runs.c[name] for name in names)).where(_runs.c.id.in_(sa.select(below.c.id)))
    return [dict(r) for r in connection.execute(query.order_by(_runs.c.started).limit(_TREE)).mappings()]


class RunPages:
    """Pages of the runs of a log, of its groups, and what belongs to a run."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    def page(
        self, chosen: RunChoice | None = None, after: Cursor | None = None, *, limit: int = 100,
        order: str = "newest",
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Rows of the view `runs`, newest first; see `read_page`."""
        query, user = chosen or RunChoice(), self._store.user
        shown = None if user is None else user.sees(_runs.c)
        return self._store.read(lambda c: read_page(c, query, after, limit, order, shown))

    def groups(
        self, chosen: RunChoice | None = None, after: Cursor | None = None, *, limit: int = 50
    ) -> list[dict[str, Any]]:
        """Groups of runs, those with the newest run first; see `read_groups`."""
        query = chosen or RunChoice()
        return self._store.read(lambda c: read_groups(c, query, after, limit))

    def group_of(self, run_id: str) -> GroupName | None:
        """The group of a run; None for an unknown run."""
        return self._store.read(lambda connection: group_of(connection, run_id))

    def tree(self, run_id: str) -> list[dict[str, Any]]:
        """The tree of forks that a run belongs to, oldest first."""
        return self._store.read(lambda connection: read_tree(connection, run_id))

    def newest_version(self, policy: str) -> int | None:
        """The newest logged version of a policy's weights."""
        return self._store.read(lambda connection: newest_version(connection, policy))
