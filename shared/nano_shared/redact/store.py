"""RedactingStore: a log store that redacts everything before it is written."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from nano_shared import schema
from nano_shared.errors import LogError, UsageError
from nano_shared.logged_run import Feedback, Said
from nano_shared.policy import DecodeIds
from nano_shared.redact.patterns import Known
from nano_shared.redact.redactor import Redactor, scrub_bytes
from nano_shared.redact.trajectory import learn, mask_turns, scrub_trajectory, scrub_value
from nano_shared.schema import ClientRequest, run_row, verdict_seal
from nano_shared.store import LogStore
from nano_shared.types import Observation, Trajectory, Turn, Verdict


def redact_run(store: LogStore, run_id: str, redactor: Redactor) -> bool:
    """Replace a logged run by its redacted copy, in one transaction. Returns whether anything changed.

    All ids of a run that holds a secret are masked, since no tokenizer is available. Old contents are
    overwritten in an SQLite file and its write-ahead log; a server's backups are not touched. Raises LogError
    for an unknown run or one that is being executed, UsageError for one that has not ended.
    """
    with store.claim(run_id):
        before = store.get(run_id)
        if before.stop is None:
            raise UsageError(f"run {run_id} has not ended; nano-coder resume {run_id} goes on with it first")
        after = scrub_trajectory(before, redactor=redactor, blobs=store.blobs)
        known = Known()
        learn(before, redactor, known)
        changed = store.database.write(lambda connection: _rewrite(connection, after, redactor, known))
        changed |= after != before
        if changed:
            store.database.overwrite_deleted()
        return changed


def _rewrite(connection: sa.Connection, run: Trajectory, redactor: Redactor, known: Known) -> bool:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    old_task = connection.scalar(sa.select(schema.runs.c.task_id).where(schema.runs.c.id == run.id))
    task_id = schema.insert_task(connection, run.task)
    schema.insert_given_tools(connection, run)
    row = run_row(run, task_id)
    connection.execute(schema.runs.update().where(schema.runs.c.id == run.id).values(**row))
    for table in (schema.tool_calls, schema.turns):
        connection.execute(table.delete().where(table.c.run_id == run.id))
    schema.insert_turns(connection, run.id, run.turns)
    left = sa.select(sa.literal(1)).where(schema.runs.c.task_id == old_task).limit(1)
    if connection.scalar(left) is None:
        connection.execute(schema.tasks.delete().where(schema.tasks.c.id == old_task))
    before = _verdicts(connection, run.id)
    whole = {row["id"] for row in before if row["seal"] == verdict_seal(run.id, str(old_task), row)}
    # a list: every row must be visited, even after one that changed
    changed = [
        _scrub_rows(connection, table, run.id, redactor, known)
        for table in (schema.verdicts, schema.feedback)
    ]
    for judged in _verdicts(connection, run.id):
        if judged["id"] in whole:
            update = schema.verdicts.update().where(schema.verdicts.c.id == judged["id"])
            connection.execute(update.values(seal=verdict_seal(run.id, task_id, judged)))
    return any(changed)


def _verdicts(connection: sa.Connection, run_id: str) -> Sequence[sa.RowMapping]:
    query = sa.select(schema.verdicts).where(schema.verdicts.c.run_id == run_id)
    return connection.execute(query).mappings().all()


def _scrub_rows(
    connection: sa.Connection, table: sa.Table, run_id: str, redactor: Redactor, known: Known
) -> bool:
    changed = False
    for row in connection.execute(sa.select(table).where(table.c.run_id == run_id)).mappings().all():
        old: dict[str, Any] = {name: value for name, value in row.items() if name not in ("id", "run_id")}
        learn(old, redactor, known)
        new = scrub_value(old, redactor, known)
        if new != old:
            connection.execute(table.update().where(table.c.id == row["id"]).values(**new))
            changed = True
    return changed


@dataclass(slots=True)
class _Run:
    known: Known = field(default_factory=Known)
    turns: list[Turn] = field(default_factory=list)
    """as they happened: secrets may begin in an earlier turn of the row"""


class RedactingStore(LogStore):
    """A log store that redacts on write; the executing process keeps the run as it happened, in memory.

    A turn is written before the next one happens, so a secret that only a later turn reveals stays in earlier
    ones; `nano-coder log redact` redacts a run as a whole. Snapshots and their files stay as they are: undo,
    apply, grading and resuming need them. Full outputs of tools are redacted.
    """

    def __init__(self, store: LogStore, redactor: Redactor, decode: DecodeIds | None) -> None:
        super().__init__(store.database, store.blobs)
        self.redactor = redactor
        self._decode = decode
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def begin(self, trajectory: Trajectory) -> None:
        run = self._of(trajectory.id)
        learn(trajectory, self.redactor, run.known)
        if trajectory.turns:  # of the parent, which is another run
            run.turns = list(trajectory.turns)
            trajectory = scrub_trajectory(
                trajectory, redactor=self.redactor, decode=self._decode, blobs=self.blobs
            )
        super().begin(scrub_value(trajectory, self.redactor, run.known))

    def append_turn(self, run_id: str, turn: Turn, request: ClientRequest | None = None) -> None:
        run = self._of(run_id)
        learn(turn, self.redactor, run.known)
        for observation in turn.observations:
            if observation.blob is not None:
                self._learn_output(observation.blob, run)
        run.turns.append(turn)
        super().append_turn(
            run_id, scrub_value(self._mask_newest_turn(run), self.redactor, run.known), request
        )

    def add_observation(self, run_id: str, turn: int, observation: Observation) -> None:
        run = self._of(run_id)
        learn(observation, self.redactor, run.known)
        if observation.blob is not None:
            self._learn_output(observation.blob, run)
        super().add_observation(run_id, turn, scrub_value(observation, self.redactor, run.known))

    def finish(self, run_id: str, **end: Any) -> None:
        run = self._of(run_id)
        learn(tuple(end.values()), self.redactor, run.known)
        scrubbed = {name: scrub_value(value, self.redactor, run.known) for name, value in end.items()}
        super().finish(run_id, **scrubbed)

    def append(self, trajectory: Trajectory) -> None:
        super().append(
            scrub_trajectory(trajectory, redactor=self.redactor, decode=self._decode, blobs=self.blobs)
        )

    def add_verdict(self, run_id: str, verdict: Verdict) -> None:
        super().add_verdict(run_id, self._scrubbed(run_id, verdict))
        with self._lock:
            self._runs.pop(run_id, None)

    def add_feedback(self, run_id: str, *feedback: Feedback) -> list[Said]:
        return super().add_feedback(run_id, *(self._scrubbed(run_id, row) for row in feedback))

    def put_blob(self, data: bytes) -> str:
        """Store the full output of a tool, redacted."""
        return super().put_blob(scrub_bytes(data, self.redactor))

    def _mask_newest_turn(self, run: _Run) -> Turn:
        """The newest turn, with the ids masked that spell a secret in its row so far."""
        turn = run.turns[-1]
        if turn.completion.tokens is None:
            return turn
        if self._decode is None and not self._tells(run):
            return turn
        return mask_turns(run.turns, self._decode, self.redactor, run.known)[-1]

    def _tells(self, run: _Run) -> bool:
        """Whether the turns so far contain a secret: then, without a decoder, all ids are masked."""
        turns = tuple(run.turns)
        return scrub_value(turns, self.redactor, run.known) != turns

    def _learn_output(self, blob: str, run: _Run) -> None:
        try:
            run.known.add(self.redactor.secrets(self.get_blob(blob).decode("utf-8", "replace")))
        except LogError:
            return  # in that case the log cannot contain any of it

    def _scrubbed(self, run_id: str, value: Any) -> Any:
        run = self._of(run_id)
        learn(value, self.redactor, run.known)
        return scrub_value(value, self.redactor, run.known)

    def _of(self, run_id: str) -> _Run:
        with self._lock:
            return self._runs.setdefault(run_id, _Run())
