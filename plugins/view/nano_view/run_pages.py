"""Pages of runs and of groups by keyset, sums over runs, and the tree of forks that a run belongs to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

import sqlalchemy as sa

from nano_shared import schema
from nano_shared.extension_points import extension_names, is_hosted
from nano_shared.schema import ESCAPED, ExactText
from nano_shared.store import LogStore
from nano_shared.types import Value
from nano_view.run_table import USED, RunTable

Cursor = tuple[float | str | int, ...]
"""place of the last row of a page"""
RewardRange = Literal["full", "partial", "zero", "none"]
_SHOWN = 400
"""characters of a text in a row of a page"""
_TREE = 500
"""largest number of runs of one tree"""
_EXACT = ("id", "parent")
_CUT = (
    "task_key", "policy", "policy_id", "prompt", "stop", "failure_kind", "trust", "family", "directory",
)  # fmt: skip
_PLAIN = ("parent_step", "reward", "turns", "sampled_tokens", "trainable", "started", "ended", "level", *USED)
_runs = sa.table(
    "runs",
    *(sa.column(name, ExactText) for name in (*_EXACT, "project")),
    *(sa.column(name, sa.Text) for name in _CUT),
    *(sa.column(name) for name in _PLAIN),
)
ORDERS: dict[str, sa.ColumnElement[Any]] = {
    "newest": _runs.c.started, "oldest": -_runs.c.started, "best": _runs.c.reward, "worst": -_runs.c.reward,
    "costliest": _runs.c.cost, "longest": _runs.c.ended - _runs.c.started,
    "most tokens": _runs.c.read + _runs.c.written,
}  # fmt: skip
"""order of a list -> what falls along it; runs without that are left out"""
_task = sa.type_coerce(_runs.c.task_key, ExactText)
# a run without `parent_step` is of a version that did not group forks by their step
_forked_from = sa.case((_runs.c.parent_step.is_(None), None), else_=_runs.c.parent)
_project = sa.func.coalesce(sa.type_coerce(_runs.c.project, sa.Text), _runs.c.directory)
SUMS: dict[str, sa.ColumnElement[Any]] = {
    "all": sa.literal("all"), "model": _runs.c.policy, "project": _project,
    "week": sa.func.date(_runs.c.started, "unixepoch", "weekday 0", "-6 days"),
}  # fmt: skip
"""what runs are added up by; a week is the date of its Monday"""


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
    project: str | None = None
    """part of the project's identity, or of its directory"""
    week: date | None = None
    """any day of it, UTC"""
    group: GroupName | None = None


def read_page(
    connection: sa.Connection, chosen: RunChoice, after: Cursor | None, limit: int, order: str = "newest"
) -> list[dict[str, Any]]:
    """Rows in an order of ORDERS behind the cursor (place, id). Long texts are cut."""
    columns = [_runs.c[name] for name in (*_EXACT, *_PLAIN)]
    cut = [sa.func.substr(_runs.c[name], 1, _SHOWN).label(name) for name in _CUT]
    place = ORDERS[order]
    query = sa.select(*columns, *cut, place.label("place")).where(*_conditions(chosen), place.is_not(None))
    query = query.order_by(place.desc(), _runs.c.id.desc()).limit(limit)
    if after is not None:
        last = sa.tuple_(sa.literal(after[0], sa.Double), sa.literal(after[1], ExactText))
        query = query.where(sa.tuple_(place, _runs.c.id) < last)
    return [_row(dict(row)) for row in connection.execute(query).mappings()]


def read_sums(connection: sa.Connection, chosen: RunChoice, by: str) -> list[dict[str, Any]]:
    """What the chosen runs came to and took, by a key of SUMS; those of the newest run first, at most 200."""
    of, key = _runs.c, sa.type_coerce(SUMS[by], ExactText).label("key")
    solved = sa.func.count().filter(of.reward >= 1).label("solved")
    schemes = [name for name in extension_names("nano.models") if is_hosted(f"{name}:")]
    apis = sa.or_(
        sa.false(), *(sa.type_coerce(of.policy, sa.Text).startswith(f"{name}:") for name in schemes)
    )
    hosted = sa.func.count().filter(of.reward >= 1, apis).label("solved_hosted")
    where = sa.func.max(sa.func.substr(of.directory, 1, _SHOWN)).label("directory")
    query = sa.select(
        key, where, sa.func.count().label("runs"), sa.func.count(of.reward).label("graded"), solved, hosted,
        sa.func.sum(of.ended - of.started).label("seconds"),
        *(sa.func.sum(of[name]).label(name) for name in USED),
    )  # fmt: skip
    query = query.where(*_conditions(chosen)).group_by(key).order_by(sa.func.max(of.started).desc())
    return [dict(row) for row in connection.execute(query.limit(200)).mappings()]


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
    if chosen.project:
        found.append(sa.or_(_holds(of.project, chosen.project), _holds(of.directory, chosen.project)))
    if chosen.week:
        found.append(SUMS["week"] == sa.func.date(str(chosen.week), "weekday 0", "-6 days"))
    if chosen.group is not None:
        found.append(_task == chosen.group.task)
        fork = of.parent == chosen.group.parent, of.parent_step == chosen.group.parent_step
        found += fork if chosen.group.parent else [sa.or_(of.parent.is_(None), of.parent_step.is_(None))]
    return found


def _mentioning(connection: sa.Connection, ids: Sequence[str], text: str) -> set[str]:
    """Those of the runs whose prompt, a completion or an observation holds the text."""
    runs, turns, calls = schema.runs.c, schema.turns.c, schema.tool_calls.c
    holds = sa.or_(
        _holds(schema.tasks.c.prompt, text),
        sa.exists().where(turns.run_id == runs.id, _holds(turns.text, text)),
        sa.exists().where(calls.run_id == runs.id, _holds(calls.text, text)),
    )
    return set(connection.scalars(sa.select(runs.id).join(schema.tasks).where(runs.id.in_(ids), holds)))


def _holds(column: sa.ColumnElement[Any], part: str) -> sa.ColumnElement[bool]:
    """Whether a text holds a part, as it is or in the spelling of JSON (`schema.ExactText`)."""
    raw = sa.type_coerce(column, sa.Text)
    spellings = dict.fromkeys((part.encode(errors="replace").decode(), json.dumps(part)[1:-1]))
    return sa.or_(*(raw.contains(spelled.replace("\0", ""), autoescape=True) for spelled in spellings))


def read_groups(
    connection: sa.Connection, chosen: RunChoice, after: Cursor | None, limit: int
) -> list[dict[str, Any]]:
    """Groups by their newest run: name, runs, one run, and number, mean, least and largest of the rewards.

    The cursor is (newest, task, parent, parent_step).
    """
    of, newest = _runs.c, sa.func.max(_runs.c.started)
    place: list[sa.ColumnElement[Any]] = [
        newest, _task, sa.func.coalesce(_forked_from, ""), sa.func.coalesce(of.parent_step, -1)
    ]  # fmt: skip
    names = [_task.label("task"), _forked_from.label("parent"), of.parent_step]
    query = sa.select(
        *names, newest.label("newest"), sa.func.count().label("runs"), sa.func.max(of.id).label("of"),
        sa.func.min(of.prompt).label("prompt"), sa.func.count(of.reward).label("graded"),
        sa.func.avg(of.reward).label("mean"), sa.func.min(of.reward).label("least"),
        sa.func.max(of.reward).label("best"),
    )  # fmt: skip
    query = query.where(*_conditions(chosen)).group_by(_task, _forked_from, of.parent_step)
    query = query.order_by(*(column.desc() for column in place)).limit(limit)
    if after is not None:
        types: tuple[Any, ...] = (sa.Double(), ExactText(), ExactText(), sa.Integer())
        bound = [sa.literal(value, kind) for value, kind in zip(after, types, strict=True)]
        query = query.having(sa.tuple_(*place) < sa.tuple_(*bound))
    return [_row(dict(row)) for row in connection.execute(query).mappings()]


def group_of(connection: sa.Connection, run_id: str) -> GroupName | None:
    """The group of a run; None for an unknown run."""
    query = sa.select(_task, _forked_from, _runs.c.parent_step).where(_runs.c.id == run_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else GroupName(task=row[0], parent=row[1], parent_step=row[2])


def read_tree(connection: sa.Connection, run_id: str) -> list[dict[str, Any]]:
    """The runs of the tree of forks that a run belongs to, oldest first; the run alone if it has no forks."""
    runs = _runs.c
    root, seen = run_id, {run_id}
    while parent := connection.scalar(sa.select(runs.parent).where(runs.id == root)):
        # the parent may be hidden, or missing in an import, which may also name a run as its own ancestor
        if parent in seen or connection.scalar(sa.select(runs.id).where(runs.id == parent)) is None:
            break
        root = parent
        seen.add(parent)
    below = sa.select(runs.id).where(runs.id == root).cte("below", recursive=True)
    below = below.union(sa.select(runs.id).join(below, runs.parent == below.c.id))
    names = ("id", "parent", "parent_step", "policy", "stop", "reward", "turns", "started")
    query = sa.select(*(runs[name] for name in names)).where(runs.id.in_(sa.select(below.c.id)))
    return [dict(r) for r in connection.execute(query.order_by(runs.started).limit(_TREE)).mappings()]


class RunPages:
    """Pages of the runs of a log, of its groups, and what belongs to a run: of those that the user sees."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._table = RunTable(store)

    def page(
        self,
        chosen: RunChoice | None = None,
        after: Cursor | None = None,
        *,
        limit: int = 100,
        order: str = "newest",
    ) -> list[dict[str, Any]]:
        """Rows of runs; see `read_page`."""
        return self._table.read(lambda c: read_page(c, chosen or RunChoice(), after, limit, order))

    def mentioning(self, rows: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
        """Those of the rows whose run holds the text in its prompt, a completion or an observation."""
        ids = [row["id"] for row in rows]
        found = self._store.read(lambda connection: _mentioning(connection, ids, text))
        return [row for row in rows if row["id"] in found]

    def sums(self, chosen: RunChoice, by: str) -> list[dict[str, Any]]:
        """Sums over the runs; see `read_sums`."""
        return self._table.read(lambda c: read_sums(c, chosen, by))

    def groups(
        self, chosen: RunChoice | None = None, after: Cursor | None = None, *, limit: int = 50
    ) -> list[dict[str, Any]]:
        """Groups of runs, those with the newest run first; see `read_groups`."""
        return self._table.read(lambda c: read_groups(c, chosen or RunChoice(), after, limit))

    def group_of(self, run_id: str) -> GroupName | None:
        """The group of a run; None for an unknown run."""
        return self._table.read(lambda connection: group_of(connection, run_id))

    def tree(self, run_id: str) -> list[dict[str, Any]]:
        """The tree of forks that a run belongs to, oldest first."""
        return self._table.read(lambda connection: read_tree(connection, run_id))

    def newest_version(self, policy: str) -> int | None:
        """The policy version in the last turn of the newest run of a policy."""
        newest = sa.select(_runs.c.id).where(sa.type_coerce(_runs.c.policy, ExactText) == policy)
        newest = newest.order_by(_runs.c.started.desc()).limit(1)
        run, turns = self._table.read(lambda connection: connection.scalar(newest)), schema.turns.c
        query = sa.select(sa.func.max(turns.policy_version)).where(turns.run_id == run)
        found: int | None = self._store.read(lambda connection: connection.scalar(query))
        return found
