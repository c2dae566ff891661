"""The reads of LogStore: runs by name, by filter and whole, on the caller's view of the log."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from pydantic import ValidationError

from nano_shared import schema
from nano_shared.errors import LogError
from nano_shared.journal import HINT
from nano_shared.rows import tool_hash, trajectory_from
from nano_shared.schema import ExactText
from nano_shared.types import CLIENT_TOOLS, StopReason, Task, ToolSpec, Trajectory, Value


class RunSummary(Value):
    id: str
    started: float
    """unix seconds"""
    ended: float | None
    task_key: str
    prompt: str
    policy: str
    """as the user named it"""
    policy_id: str | None
    """weights that sampled the last turn; None before the first turn"""
    stop: StopReason | None
    reward: float | None
    """of the newest verdict"""
    turns: int
    sampled_tokens: int
    trainable: bool
    """every turn holds token ids and log-probs"""


_AMBIGUOUS_SHOWN = 3
_PAGE = 500
_MOST_ANSWERS = 64
"""of equal conversations: all that matters is whether they were sampled alike"""
_newest_first = (schema.runs.c.started.desc(), schema.runs.c.id.desc())
# times and counts are as in the view; text needs the type that undoes its escapes
_texts = {"id", "task_key", "prompt", "policy", "policy_id", "stop"}
_summary = sa.table(
    "runs", *(sa.column(name, ExactText if name in _texts else None) for name in RunSummary.model_fields)
)


class Heading(NamedTuple):
    """Data of a run for a pass over many runs, before loading any."""

    run_id: str
    started: float
    task_key: str


def resolve(connection: sa.Connection, run: str, log: str) -> str:
    """The run's id from an id, a unique prefix or "last". Raises LogError."""
    ids = schema.runs.c.id
    if run == "last":
        newest = connection.scalar(sa.select(ids).order_by(*_newest_first).limit(1))
        if newest is None:
            raise LogError(f"log {log} holds no runs yet")
        return str(newest)
    if run and connection.scalar(sa.select(ids).where(ids == run)) is not None:
        return run
    query = (
        sa.select(ids).where(ids.startswith(run, autoescape=True)).order_by(ids).limit(_AMBIGUOUS_SHOWN + 1)
    )
    found = connection.scalars(query).all() if run else []
    if len(found) == 1:
        return str(found[0])
    if found:
        some = ", ".join(found[:_AMBIGUOUS_SHOWN]) + (", ..." if len(found) > _AMBIGUOUS_SHOWN else "")
        raise LogError(f"run {run!r} is ambiguous: it begins {some}; give more of the id")
    raise LogError(f"no run {run!r} in log {log}; {HINT}")


def load(connection: sa.Connection, run_id: str) -> Trajectory:
    """A whole run. Raises LogError if its rows are damaged."""
    runs, turns, calls, verdicts = schema.runs, schema.turns, schema.tool_calls, schema.verdicts

    def rows(query: sa.Select[Any]) -> Sequence[sa.RowMapping]:
        return connection.execute(query).mappings().all()

    newest = sa.select(verdicts).where(verdicts.c.run_id == run_id).order_by(verdicts.c.id.desc()).limit(1)
    try:
        row = rows(sa.select(runs, schema.tasks.c.body).join(schema.tasks).where(runs.c.id == run_id))[0]
        return trajectory_from(
            row,
            rows(sa.select(turns).where(turns.c.run_id == run_id).order_by(turns.c.turn)),
            rows(sa.select(calls).where(calls.c.run_id == run_id).order_by(calls.c.turn, calls.c.position)),
            next(iter(rows(newest)), None),
            given_tools(connection, row["given_tools"]),
        )
    except (ValueError, struct.error) as damage:
        cause = damage.errors()[0]["msg"] if isinstance(damage, ValidationError) else str(damage)
        raise LogError(
            f"run {run_id} is damaged in the log ({cause}); `nano-coder log verify {run_id}` says more"
        ) from damage


def given_tools(connection: sa.Connection, hashes: Sequence[str] | None) -> tuple[ToolSpec, ...]:
    """The tools of these hashes. Raises ValueError for one that the log lost."""
    table = schema.given_tools
    query = sa.select(table.c.hash, table.c.spec).where(table.c.hash.in_(hashes or ()))
    found = {row.hash: row.spec for row in connection.execute(query)} if hashes else {}
    if missing := set(hashes or ()) - found.keys():
        raise ValueError(f"the tool {min(missing)} that it was given is missing")
    return tuple(ToolSpec.model_validate(found[each]) for each in hashes or ())


def earlier_tool(connection: sa.Connection, tool: ToolSpec) -> tuple[ToolSpec, float] | None:
    """The newest tool of that name that runs were given, and since when; None if they had this very one."""
    table = schema.given_tools
    query = sa.select(table).where(table.c.name == tool.name).order_by(table.c.first_seen.desc())
    rows = connection.execute(query).all()
    if not rows or tool_hash(tool) in {row.hash for row in rows}:
        return None
    return ToolSpec.model_validate(rows[0].spec), rows[0].first_seen


def load_task(connection: sa.Connection, run_id: str) -> Task:
    """Raises LogError for an unknown run, and for a damaged task row."""
    query = sa.select(schema.tasks.c.body).join(schema.runs).where(schema.runs.c.id == run_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise LogError(f"no run {run_id!r} in the log; {HINT}")
    try:
        return Task.model_validate(row.body)
    except ValueError as damage:
        raise LogError(f"the task of run {run_id} is damaged in the log ({damage})") from damage


def _by_policy(policy: str) -> sa.ColumnElement[bool]:
    runs, turns = schema.runs, schema.turns
    sampled = sa.exists().where(turns.c.run_id == runs.c.id, turns.c.policy_id == policy)
    return sa.or_(runs.c.policy == policy, sampled)


def select_headings(
    policy: str | None, since: float | None, *, by_task: bool, after: Heading | None
) -> sa.Select[tuple[str, float, str]]:
    """The page of headings after `after`: oldest first, or by task key and then oldest first."""
    runs, tasks = schema.runs, schema.tasks
    place = [runs.c.started, runs.c.id]
    if by_task:
        place = [tasks.c.key, *place]
    query = sa.select(runs.c.id, runs.c.started, tasks.c.key).join(tasks).order_by(*place).limit(_PAGE)
    if since is not None:
        query = query.where(runs.c.started >= since)
    if policy is not None:
        query = query.where(_by_policy(policy))
    if after is not None:
        values = (after.task_key, after.started, after.run_id)[0 if by_task else 1 :]
        typed = [sa.literal(value, column.type) for value, column in zip(values, place, strict=True)]
        query = query.where(sa.tuple_(*place) > sa.tuple_(*typed))
    return query


def select_session(session: str, owner: str | None) -> sa.Select[tuple[str]]:
    runs, requests = schema.runs, schema.requests
    of_session = sa.select(requests.c.run_id).where(requests.c.session == session)
    if owner is not None:
        of_session = of_session.where(requests.c.owner == owner)
    return sa.select(runs.c.id).where(runs.c.id.in_(of_session)).order_by(runs.c.started, runs.c.id)


def select_answers(session: str, owner: str, conversations: Sequence[str]) -> sa.Select[tuple[str, int, str]]:
    runs, requests = schema.runs, schema.requests
    return (
        sa.select(requests.c.run_id, requests.c.turn, requests.c.conversation)
        .join(runs)
        .where(
            requests.c.conversation.in_(conversations),
            requests.c.session == session,
            requests.c.owner == owner,
        )
        .order_by(*_newest_first)
        .limit(_MOST_ANSWERS)
    )


def select_left_open(task_prefix: str, before: float) -> sa.Select[tuple[str]]:
    runs, tasks, turns = schema.runs, schema.tasks, schema.turns
    last = sa.select(sa.func.max(turns.c.ended)).where(turns.c.run_id == runs.c.id).scalar_subquery()
    return (
        sa.select(runs.c.id)
        .join(tasks)
        .where(
            runs.c.stop.is_(None),
            tasks.c.key.startswith(task_prefix, autoescape=True),
            sa.func.coalesce(last, runs.c.started) < before,
        )
    )


def select_open(run_id: str) -> sa.Select[tuple[str]]:
    runs = schema.runs
    served = runs.c.tools_hash.startswith(CLIENT_TOOLS, autoescape=True)
    return sa.select(runs.c.id).where(runs.c.id == run_id, runs.c.stop.is_(None), ~served)


def select_summaries() -> sa.Select[tuple[object, ...]]:
    """Rows for RunSummary, newest first."""
    return sa.select(_summary).order_by(_summary.c.started.desc(), _summary.c.id.desc())
