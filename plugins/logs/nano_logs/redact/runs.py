"""Redacts whole runs, every text and the tokens that spell secrets; and logs while they are written."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import sqlalchemy as sa

from nano_logs.redact.patterns import Known
from nano_logs.redact.redactor import Redactor, scrub_bytes
from nano_shared import schema
from nano_shared.errors import LogError, UsageError
from nano_shared.logged_run import Feedback, LoggedRun, Said
from nano_shared.policy import DecodeIds
from nano_shared.schema import ClientRequest, run_row, verdict_seal
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore
from nano_shared.types import REDACTED_ID, Observation, Trajectory, Turn, TurnTokens, Value, Verdict


def masked_positions(ids: Sequence[int], decode: DecodeIds, redactor: Redactor, known: Known) -> set[int]:
    """Positions of a row of ids whose text overlaps a secret. Texts of single ids are joined, so that secrets
    across their boundaries are found. If a tokenizer writes differently in context, a whole stretch in which
    something is still found is masked."""
    texts = {i: "" if i == REDACTED_ID else decode([i]) for i in set(ids)}
    masked = {at for at, i in enumerate(ids) if i == REDACTED_ID}
    while True:
        more = _overlapping(ids, texts, masked, redactor, known)
        for stretch in _stretches(len(ids), masked | more):
            if redactor.find(decode([ids[at] for at in stretch]), known):
                more |= set(stretch)
        if not more:
            return masked
        masked |= more


def _overlapping(
    ids: Sequence[int], texts: dict[int, str], masked: set[int], redactor: Redactor, known: Known
) -> set[int]:
    """Positions, not yet masked, whose text overlaps a secret; masked ones count as line ends."""
    pieces = ["\n" if at in masked else texts[i] for at, i in enumerate(ids)]
    ends = list(accumulate(map(len, pieces)))
    return {
        at
        for span in redactor.find("".join(pieces), known)
        for at in range(bisect_right(ends, span.start), bisect_left(ends, span.end) + 1)
        if at not in masked
    }


def _stretches(length: int, masked: set[int]) -> Iterable[range]:
    """The longest stretches without a masked position."""
    edges = [-1, *sorted(masked), length]
    return [range(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


def mask_turns(
    turns: Sequence[Turn], decode: DecodeIds | None, redactor: Redactor, known: Known
) -> tuple[Turn, ...]:
    """The turns with their ids masked, row by row: a placeholder for each id, log-prob 0 for a sampled one.
    Without `decode`, it is unknown which ids spell the secret, and all are masked."""
    masked = {
        number: set(range(len(ids))) if decode is None else masked_positions(ids, decode, redactor, known)
        for number, ids in _rows(turns).items()
    }
    begins: Counter[int] = Counter()
    changed = []
    for turn in turns:
        if (tokens := turn.completion.tokens) is not None:
            begin, split = begins[tokens.row], len(tokens.context_ids)
            ids = [
                REDACTED_ID if begin + at in masked[tokens.row] else i
                for at, i in enumerate((*tokens.context_ids, *tokens.sampled_ids))
            ]
            begins[tokens.row] += len(ids)
            sampled = zip(ids[split:], tokens.logprobs, strict=True)
            of_tokens = {
                "context_ids": tuple(ids[:split]),
                "sampled_ids": tuple(ids[split:]),
                "logprobs": tuple(0.0 if i == REDACTED_ID else p for i, p in sampled),
            }
            hidden = tokens.model_copy(update=of_tokens)
            completion = turn.completion.model_copy(update={"tokens": hidden})
            turn = turn.model_copy(update={"completion": completion})
        changed.append(turn)
    return tuple(changed)


def _rows(turns: Sequence[Turn]) -> dict[int, list[int]]:
    """The ids of each token row."""
    rows: dict[int, list[int]] = {}
    for turn in turns:
        if (tokens := turn.completion.tokens) is not None:
            rows.setdefault(tokens.row, []).extend((*tokens.context_ids, *tokens.sampled_ids))
    return rows


T = TypeVar("T")
V = TypeVar("V", bound=Value)


def scrub_trajectory(
    trajectory: Trajectory,
    *,
    redactor: Redactor | None = None,
    decode: DecodeIds | None = None,
    blobs: BlobStore | None = None,
) -> Trajectory:
    """The run with a marker for each secret in its texts, and a placeholder for each token of one.

    A secret that is recognised anywhere is hidden everywhere, and so are eight characters of a long one, as
    truncated observations leave them. `decode` gives the text of ids; without it, all ids of a run that holds
    a secret are masked. `blobs` allows reading the full outputs behind truncated observations for secrets;
    they and the snapshots are not changed (see `scrub_snapshot`).
    """
    redactor = redactor or Redactor()
    known = Known()
    learn(trajectory, redactor, known)
    if blobs is not None:
        for text in _outputs(trajectory, blobs):
            known.add(redactor.secrets(text))
    if decode is not None:
        for ids in _rows(trajectory.turns).values():
            text = "".join("\n" if i == REDACTED_ID else decode([i]) for i in ids)
            known.add(redactor.secrets(text))
    scrubbed = scrub_value(trajectory, redactor, known)
    if decode is None and scrubbed == trajectory:
        return trajectory
    return scrubbed.model_copy(update={"turns": mask_turns(scrubbed.turns, decode, redactor, known)})


def learn(value: object, redactor: Redactor, known: Known) -> None:
    """Add every secret in the texts of a value to `known`."""

    def look(text: str) -> str:
        known.add(redactor.secrets(text))
        return text

    map_texts(value, look)


def scrub_value(value: T, redactor: Redactor, known: Known) -> T:
    """A value with its texts redacted; token ids are left alone."""
    return map_texts(value, lambda text: redactor.scrub(text, known)[0])


def map_texts(value: T, change: Callable[[str], str]) -> T:
    """The value with `change` applied to every text in it, keys of dictionaries included."""
    result: Any = value
    if isinstance(value, Enum | TurnTokens):
        return value
    if isinstance(value, str):
        result = change(value)
    elif isinstance(value, Value):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: map_texts(old, change) for name, old in fields.items()}
        result = value.model_copy(update=changed)
    elif isinstance(value, tuple | list):
        result = type(value)(map_texts(item, change) for item in value)
    elif isinstance(value, dict):
        result = {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    return result  # type: ignore[no-any-return]


def _outputs(trajectory: Trajectory, blobs: BlobStore) -> Iterator[str]:
    """The full outputs; one whose blob is missing is not exported either."""
    for turn in trajectory.turns:
        for observation in turn.observations:
            if observation.blob is not None:
                with suppress(LogError):
                    yield blobs.get(observation.blob).decode("utf-8", "replace")


def redacted_runs(runs: Iterable[LoggedRun], blobs: BlobStore) -> Iterator[LoggedRun]:
    """The runs without secrets, also in verdicts and feedback, and with the tokens of secrets masked."""
    for run in runs:
        texts = redacted(run)
        verdict = texts.verdicts[-1] if texts.verdicts else None
        scrubbed = scrub_trajectory(run.trajectory, blobs=blobs).model_copy(update={"verdict": verdict})
        yield texts.model_copy(update={"trajectory": scrubbed})


def redacted(value: V) -> V:
    """A value with every text in it redacted."""
    redactor, known = Redactor(), Known()
    learn(value, redactor, known)  # a secret that is found anywhere is hidden everywhere
    scrubbed: V = scrub_value(value, redactor, known)
    return scrubbed


def redact_run(store: LogStore, run_id: str, redactor: Redactor) -> bool:
    """Replace a logged run by its redacted copy, in one transaction. Returns whether anything changed. All
    ids of a run that holds a secret are masked, since no tokenizer is available. Old contents are overwritten
    in an SQLite file and its write-ahead log; a server's backups are not touched. Raises LogError for an
    unknown run or one that is being executed, UsageError for one that has not ended."""
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
    tables = (schema.verdicts, schema.feedback)
    # a list: every row must be visited, even after one that changed
    changed = [_scrub_rows(connection, table, run.id, redactor, known) for table in tables]
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
        super().__init__(store.database, store.blobs, store.user)
        self.redactor = redactor
        self._decode = decode
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def begin(self, trajectory: Trajectory) -> None:
        run = self._of(trajectory.id)
        learn(trajectory, self.redactor, run.known)
        if trajectory.turns:  # of the parent, which is another run
            run.turns = list(trajectory.turns)
            trajectory = self._whole(trajectory)
        super().begin(scrub_value(trajectory, self.redactor, run.known))

    def append_turn(self, run_id: str, turn: Turn, request: ClientRequest | None = None) -> None:
        run = self._of(run_id)
        learn(turn, self.redactor, run.known)
        for observation in turn.observations:
            self._learn_output(observation, run)
        run.turns.append(turn)
        scrubbed = scrub_value(self._mask_newest_turn(run), self.redactor, run.known)
        super().append_turn(run_id, scrubbed, request)

    def add_observation(self, run_id: str, turn: int, observation: Observation) -> None:
        run = self._of(run_id)
        learn(observation, self.redactor, run.known)
        self._learn_output(observation, run)
        super().add_observation(run_id, turn, scrub_value(observation, self.redactor, run.known))

    def finish(self, run_id: str, **end: Any) -> None:
        run = self._of(run_id)
        learn(tuple(end.values()), self.redactor, run.known)
        scrubbed = {name: scrub_value(value, self.redactor, run.known) for name, value in end.items()}
        super().finish(run_id, **scrubbed)

    def append(self, trajectory: Trajectory) -> None:
        super().append(self._whole(trajectory))

    def _whole(self, run: Trajectory) -> Trajectory:
        return scrub_trajectory(run, redactor=self.redactor, decode=self._decode, blobs=self.blobs)

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
        turns = tuple(run.turns)
        if self._decode is None and scrub_value(turns, self.redactor, run.known) == turns:
            return turn  # no secret so far; with one, all ids are masked for want of a decoder
        return mask_turns(turns, self._decode, self.redactor, run.known)[-1]

    def _learn_output(self, observation: Observation, run: _Run) -> None:
        if observation.blob is not None:
            with suppress(LogError):  # of a blob that is missing the log cannot contain anything
                output = self.get_blob(observation.blob).decode("utf-8", "replace")
                run.known.add(self.redactor.secrets(output))

    def _scrubbed(self, run_id: str, value: Any) -> Any:
        run = self._of(run_id)
        learn(value, self.redactor, run.known)
        return scrub_value(value, self.redactor, run.known)

    def _of(self, run_id: str) -> _Run:
        with self._lock:
            return self._runs.setdefault(run_id, _Run())
