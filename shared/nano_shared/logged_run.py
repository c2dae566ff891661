"""A run with everything that the log holds of it, and its import into another log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from nano_shared import journal, run_queries, schema
from nano_shared.errors import LogError
from nano_shared.feedback import Feedback
from nano_shared.rows import feedback_from, verdict_from
from nano_shared.types import Trajectory, Value, Verdict


class LoggedRun(Value):
    trajectory: Trajectory
    verdicts: tuple[Verdict, ...] = ()
    """every verdict, newest last; the last one is the trajectory's"""
    feedback: tuple[Feedback, ...] = ()

    @property
    def whole(self) -> Trajectory:
        """The trajectory with the newest of `verdicts`."""
        return self.trajectory.model_copy(update={"verdict": self.verdicts[-1] if self.verdicts else None})

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values. (Pydantic's JSON mode loses half surrogates in keys of objects.)"""
        body: dict[str, Any] = json.loads(json.dumps(self.model_dump()))
        return body


@dataclass(slots=True)
class Merged:
    """Result of an import, in runs."""

    added: int = 0
    extended: int = 0
    """existed, and gained verdicts or feedback"""
    known: int = 0
    """existed already, with all that the file has"""


def load_logged(connection: sa.Connection, run_id: str) -> LoggedRun:
    trajectory = run_queries.load(connection, run_id)
    return LoggedRun(
        trajectory=trajectory,
        verdicts=verdicts_of(connection, run_id),
        feedback=feedback_of(connection, run_id),
    )


def verdicts_of(connection: sa.Connection, run_id: str) -> tuple[Verdict, ...]:
    """Every verdict of a run, newest last."""
    table = schema.verdicts
    query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
    return tuple(verdict_from(row) for row in connection.execute(query).mappings())


def feedback_of(connection: sa.Connection, run_id: str) -> tuple[Feedback, ...]:
    """The feedback of a run, in order of arrival."""
    table = schema.feedback
    query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
    return tuple(feedback_from(row) for row in connection.execute(query).mappings())


def merge_run(connection: sa.Connection, run: LoggedRun, merged: Merged) -> None:
    """Add a run, or add the missing verdicts and feedback to an existing one.

    Raises LogError if the log holds another run with that id.
    """
    trajectory = run.trajectory
    exists = sa.select(sa.literal(1)).where(schema.runs.c.id == trajectory.id)
    if connection.scalar(exists) is None:
        # the directory on another machine is dropped: `apply` must not write where an imported file says
        journal.insert_run(connection, trajectory.model_copy(update={"directory": None}))
        journal.insert_turns(connection, trajectory.id, trajectory.turns)
        merged.added += 1
        _append(connection, trajectory.id, run.verdicts, run.feedback)
        return
    there = load_logged(connection, trajectory.id)
    bare = {"verdict": None, "directory": None}
    if there.trajectory.model_copy(update=bare) != trajectory.model_copy(update=bare):
        raise LogError(
            f"run {trajectory.id} is in the log with another content; import into another log with --log"
        )
    verdicts = tuple(v for v in run.verdicts if v not in there.verdicts)
    feedback = tuple(f for f in run.feedback if f not in there.feedback)
    _append(connection, trajectory.id, verdicts, feedback)
    if verdicts or feedback:
        merged.extended += 1
    else:
        merged.known += 1


def _append(
    connection: sa.Connection, run_id: str, verdicts: tuple[Verdict, ...], feedback: tuple[Feedback, ...]
) -> None:
    for verdict in verdicts:
        journal.insert_verdict(connection, run_id, verdict)
    for said in feedback:
        journal.insert_feedback(connection, run_id, said)
