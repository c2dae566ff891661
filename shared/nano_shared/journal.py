"""The writes of LogStore: one function for each kind of entry, inside the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from nano_shared import schema
from nano_shared.errors import LogError
from nano_shared.feedback import Feedback
from nano_shared.rows import (
    feedback_row,
    observation_columns,
    run_row,
    task_row,
    tool_call_rows,
    tool_hash,
    turn_row,
    verdict_row,
    verdict_seal,
)
from nano_shared.types import Observation, StopReason, Task, Trajectory, Turn, Verdict


class ClientRequest(NamedTuple):
    """What is logged of a client's request beside the turn that answers it."""

    session: str
    """empty for a client that named none"""
    client: str
    """user agent"""
    conversation: str
    """hash of all messages up to the answer, by which a later request finds the turn"""
    owner: str = ""
    """of the client's key, to whom the session belongs; empty without one"""


HINT = "see `nano-coder log list`"

# compiled once: SQLAlchemy caches on the statement, and compiling costs more than SQLite's own work
_RUN = sa.bindparam("run", type_=schema.runs.c.id.type)
_RUN_IS_THERE = sa.select(sa.literal(1)).where(schema.runs.c.id == _RUN)
_TASK_IS_THERE = sa.select(sa.literal(1)).where(schema.tasks.c.id == sa.bindparam("task"))
_TURN_COUNT = sa.select(sa.func.count()).where(schema.turns.c.run_id == _RUN)
_STOP_AND_TURNS = (
    sa.select(schema.runs.c.stop, _TURN_COUNT.scalar_subquery())
    .where(schema.runs.c.id == _RUN)
    .with_for_update(of=schema.runs)
)
_ADD_RUN, _ADD_TURN, _ADD_CALL = (table.insert() for table in (schema.runs, schema.turns, schema.tool_calls))


def insert_run(connection: sa.Connection, trajectory: Trajectory) -> None:
    task_id = insert_task(connection, trajectory.task)
    if connection.scalar(_RUN_IS_THERE, {"run": trajectory.id}) is not None:
        raise LogError(f"run {trajectory.id} is already in the log; {HINT}")
    insert_given_tools(connection, trajectory)
    connection.execute(_ADD_RUN, run_row(trajectory, task_id))


def insert_given_tools(connection: sa.Connection, trajectory: Trajectory) -> None:
    """Add the tools that the run was given and the log does not hold yet."""
    table = schema.given_tools
    for tool in trajectory.given_tools:
        key = tool_hash(tool)
        if connection.scalar(sa.select(sa.literal(1)).where(table.c.hash == key)) is None:
            row = {"hash": key, "name": tool.name, "spec": tool.model_dump(), "first_seen": time.time()}
            # on a server another process may be first, with the same
            with suppress(IntegrityError), connection.begin_nested():
                connection.execute(table.insert(), row)


def insert_task(connection: sa.Connection, task: Task) -> str:
    row = task_row(task)
    if connection.scalar(_TASK_IS_THERE, {"task": row["id"]}) is None:
        try:
            with connection.begin_nested():
                connection.execute(schema.tasks.insert(), row)
        except IntegrityError:
            # on a server another process may be first; a task's id is its content hash, so both wrote the
            # same
            pass
    return str(row["id"])


def insert_turns(
    connection: sa.Connection, run_id: str, turns: Sequence[Turn], *, logged_turns: int = 0
) -> None:
    """Add turns to a run that has `held` turns. Raises LogError for a turn out of order."""
    for expected, turn in enumerate(turns, logged_turns):
        if turn.index != expected:
            raise LogError(f"run {run_id} holds {expected} turns, so turn {turn.index} cannot be its next")
    rows = [turn_row(run_id, turn) for turn in turns]
    calls = [row for turn in turns for row in tool_call_rows(run_id, turn)]
    # one statement for all rows with the same columns: a turn without tokens omits theirs
    for _, alike in groupby(rows, key=len):
        connection.execute(_ADD_TURN, list(alike))
    if calls:
        connection.execute(_ADD_CALL, calls)


def append_turn(
    connection: sa.Connection, run_id: str, turn: Turn, request: ClientRequest | None = None
) -> None:
    """Add the next turn. Raises LogError for an unknown or ended run, and for a turn out of order."""
    logged_turns = refuse_ended(connection, run_id)
    if logged_turns != turn.index:
        # a server counts before it waits for the run's lock, so that another writer's turn may be missing
        logged_turns = connection.scalar(_TURN_COUNT, {"run": run_id}) or 0
    try:
        insert_turns(connection, run_id, (turn,), logged_turns=logged_turns)
    except IntegrityError:
        raise LogError(f"another process has logged turn {turn.index} of run {run_id} meanwhile") from None
    if request is not None:
        row = {"run_id": run_id, "turn": turn.index, **request._asdict()}
        connection.execute(schema.requests.insert(), row)


def insert_observation(connection: sa.Connection, run_id: str, turn: int, observation: Observation) -> None:
    """Add what the last call of a turn came to, which was logged without. Raises LogError for an ended run,
    and where no call waits."""
    refuse_ended(connection, run_id)
    calls = schema.tool_calls
    waits = (calls.c.run_id == run_id) & (calls.c.turn == turn) & calls.c.ok.is_(None)
    if (
        connection.execute(calls.update().where(waits).values(**observation_columns(observation))).rowcount
        != 1
    ):
        raise LogError(f"no call of turn {turn} of run {run_id} waits for an observation")


def insert_verdict(connection: sa.Connection, run_id: str, verdict: Verdict) -> None:
    stop_of(connection, run_id)
    row = verdict_row(run_id, verdict, time.time())
    connection.execute(schema.verdicts.insert(), row | {"seal": seal_of(connection, run_id, row)})


def seal_of(connection: sa.Connection, run_id: str, row: Mapping[Any, Any]) -> str:
    """The seal of a verdict's row of that run (`verdict_seal`)."""
    task_id = connection.scalar(sa.select(schema.runs.c.task_id).where(schema.runs.c.id == run_id))
    return verdict_seal(run_id, str(task_id), row)


def insert_feedback(connection: sa.Connection, run_id: str, feedback: Feedback) -> int:
    """Returns the id of the row."""
    stop_of(connection, run_id)
    done = connection.execute(schema.feedback.insert(), feedback_row(run_id, feedback))
    return int(done.inserted_primary_key[0])  # type: ignore[index]


def end_run(connection: sa.Connection, run_id: str, end: dict[str, Any]) -> None:
    connection.execute(schema.runs.update().where(schema.runs.c.id == run_id).values(**end))


def set_last_snapshot(connection: sa.Connection, run_id: str, snapshot: str) -> None:
    """Give the last turn of a run the workspace that it left, if it was logged without one."""
    turns = schema.turns
    last = sa.select(sa.func.max(turns.c.turn)).where(turns.c.run_id == run_id).scalar_subquery()
    of_run = (turns.c.run_id == run_id) & (turns.c.turn == last) & turns.c.snapshot.is_(None)
    connection.execute(turns.update().where(of_run).values(snapshot=snapshot))


def clear_end(connection: sa.Connection, run_id: str) -> None:
    """Raises LogError for a run that the policy ended, since that is a result."""
    stop = stop_of(connection, run_id)
    if stop is not None and not stop.ours:
        raise LogError(
            f"run {run_id} ended with {stop.value!r}, which is a result; only a run that was killed, "
            "interrupted or failed by no fault of the policy can be resumed. Fork it instead"
        )
    cleared = dict.fromkeys(("stop", "stop_detail", "answer", "ended"))
    end_run(connection, run_id, {**cleared, "diff": ""})


def refuse_ended(connection: sa.Connection, run_id: str) -> int:
    """Raises LogError for an unknown or ended run. Returns the number of its turns."""
    stop, turns = _state_of(connection, run_id)
    if stop is not None:
        raise LogError(f"run {run_id} has ended with {stop.value!r}; resume or fork it")
    return turns


def stop_of(connection: sa.Connection, run_id: str) -> StopReason | None:
    """Why the run ended; None if it has not. Raises LogError for an unknown run."""
    return _state_of(connection, run_id)[0]


def _state_of(connection: sa.Connection, run_id: str) -> tuple[StopReason | None, int]:
    """Why the run ended, and the number of its turns. Raises LogError for an unknown run.

    Locks the run's row where the database locks rows, so that writers of one run take turns.
    """
    row = connection.execute(_STOP_AND_TURNS, {"run": run_id}).one_or_none()
    if row is None:
        raise LogError(f"no run {run_id!r} in the log; {HINT}")
    stop, turns = row
    return None if stop is None else StopReason(stop), turns
