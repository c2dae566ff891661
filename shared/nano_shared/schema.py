"""The tables of the log, and their rows: values are converted to them and back, exactly."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    RowMapping,
    Table,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import IntegrityError

from nano_shared.errors import LogError
from nano_shared.files import content_hash
from nano_shared.logged_run import Feedback, Said
from nano_shared.types import (
    ApiAnswer,
    Completion,
    Denials,
    Observation,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

ESCAPED = "\x1bjson:"
"""begins a text that is stored as JSON"""


class ExactText(sa.TypeDecorator[str]):
    """Text with what databases refuse: NUL, and lone surrogates (bytes of non-UTF-8 file names).

    Such text is stored as a marker and its JSON form; all other text unchanged.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or _plain(value):
            return value
        return ESCAPED + json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is not None and value.startswith(ESCAPED):
            return str(json.loads(value.removeprefix(ESCAPED)))
        return value


class Json(sa.TypeDecorator[Any]):
    """JSON as text, readable where Unicode allows. Keeps the order of keys, infinities and large integers."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        text = json.dumps(value, ensure_ascii=False)
        return text if _plain(text) else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Packed(sa.TypeDecorator[tuple[Any, ...]]):
    """A tuple of numbers as one blob: little-endian, `I` for uint32 ids, `d` for float64 log-probs.

    Log-probs are stored in float64 because a trajectory must come back equal to the one that was appended.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def process_bind_param(self, value: tuple[Any, ...] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else struct.pack(f"<{len(value)}{self.code}", *value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[Any, ...] | None:
        if value is None:
            return None
        count = len(value) // struct.calcsize(f"<{self.code}")
        return struct.unpack(f"<{count}{self.code}", value)


def _plain(text: str) -> bool:
    if "\0" in text or text.startswith(ESCAPED):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


FIRST, HEAD = "0012", "0013"
"""oldest and newest migration; revisions are zero-padded numbers, so that they compare as text"""
VERSION_TABLE = "log_version"

metadata = MetaData()

tasks = Table(
    "log_tasks",
    metadata,
    Column("id", ExactText, primary_key=True),  # content hash of the whole task
    Column("key", ExactText, nullable=False),
    Column("prompt", ExactText, nullable=False),
    Column("split", ExactText),
    Column("level", Integer),
    Column("family", ExactText),
    Column("body", Json, nullable=False),  # the whole task, hidden checks included
    Index("log_tasks_key", "key"),
)

runs = Table(
    "log_runs",
    metadata,
    Column("id", ExactText, primary_key=True),
    Column("task_id", ExactText, ForeignKey("log_tasks.id"), nullable=False),
    Column("policy", ExactText, nullable=False),
    Column("profile", ExactText, nullable=False),
    Column("profile_hash", ExactText, nullable=False),
    Column("template_hash", ExactText, nullable=False),
    Column("tools_hash", ExactText, nullable=False),
    Column("runtime_version", ExactText, nullable=False),
    Column("parent", ExactText),  # no foreign key: the parent may live in another log
    Column("parent_step", Integer),  # number of turns that are the parent's; NULL in runs of older versions
    Column("seed", Json),  # seeds may exceed 64 bits
    Column("snapshot", ExactText),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("stop", ExactText),
    Column("stop_detail", ExactText),
    Column("answer", ExactText),
    Column("diff", ExactText, nullable=False),
    Column("given_tools", Json),  # hashes of tools beside the profile's; NULL for none, and in older versions
    Column("directory", ExactText),  # NULL where a task brought its files, and in runs of older versions
    Column("owner", ExactText),  # these three are NULL in runs of older versions
    Column("project", ExactText),  # NULL without a directory
    Column("share", ExactText),
    Index("log_runs_started", "started", "id"),
    Index("log_runs_task", "task_id"),
    Index("log_runs_parent", "parent"),
    Index("log_runs_directory", "directory", "started"),
)

turns = Table(
    "log_turns",
    metadata,
    Column("run_id", ExactText, ForeignKey("log_runs.id"), primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("policy_id", ExactText, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("finish", ExactText, nullable=False),
    Column("context_tokens", Integer),  # the four token columns are NULL on a text-only turn
    Column("sampled_tokens", Integer),
    Column("token_row", Integer),
    Column("context_ids", Packed("I")),
    Column("sampled_ids", Packed("I")),
    Column("logprobs", Packed("d")),
    Column("sampling", Json, nullable=False),
    Column("text", ExactText, nullable=False),
    Column("thought", ExactText, nullable=False),
    Column("parse_error", ExactText),
    Column("parser", ExactText, nullable=False),
    Column("repairs", Json, nullable=False),
    Column("messages", Json),  # NULL where nano's own loop asked, and in turns of older versions
    Column("snapshot", ExactText),
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("api", Json),  # what an API returned beside the text; NULL for other policies
    Column("delegated_by", Integer),  # of a sub-agent: the turn that delegated to it; else NULL
)

tool_calls = Table(
    "log_tool_calls",
    metadata,
    Column("run_id", ExactText, primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    # the call; NULL if the observation answers none
    Column("call_name", ExactText),
    Column("arguments", Json),
    # the observation; NULL if the call was never executed
    Column("tool", ExactText),
    Column("ok", Boolean),
    Column("text", ExactText),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("timed_out", Boolean),
    Column("bytes_total", BigInteger),
    Column("truncated", Boolean),
    Column("blob", ExactText),
    Column("files_changed", Json),
    Column("images", Json),  # NULL for none, and in calls of older versions
    Column("denied_network", Integer),
    Column("denied_secrets", Integer),
    Column("denied_writes_outside", Integer),
    Column("started", Double),
    Column("ended", Double),
    ForeignKeyConstraint(["run_id", "turn"], ["log_turns.run_id", "log_turns.turn"]),
)

verdicts = Table(
    "log_verdicts",
    metadata,
    Column("id", Integer, primary_key=True),  # the verdict with the largest id is the newest
    Column("run_id", ExactText, ForeignKey("log_runs.id"), nullable=False),
    Column("created", Double, nullable=False),
    Column("reward", Double),
    Column("components", Json, nullable=False),
    Column("turn_rewards", Json),
    Column("checks", Json, nullable=False),
    Column("tampering", Json, nullable=False),
    Column("failure_kind", ExactText),
    Column("trust", ExactText, nullable=False),
    Column("grader", ExactText, nullable=False),
    Column("graded_hash", ExactText, nullable=False),
    Column("check_run", Json),
    Column("seal", ExactText),  # `verdict_seal`; NULL: written before there were seals
    Index("log_verdicts_run", "run_id", "id"),
)

requests = Table(
    "log_requests",
    metadata,
    Column("run_id", ExactText, ForeignKey("log_runs.id"), primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("session", ExactText, nullable=False),  # empty for a client that named none
    Column("client", ExactText, nullable=False),  # user agent
    Column("conversation", ExactText, nullable=False),  # hash of all messages up to the answer
    Column("owner", ExactText, nullable=False, server_default=""),  # of the client's key; empty without one
    Index("log_requests_session", "session"),
    Index("log_requests_conversation", "conversation"),
)

feedback = Table(
    "log_feedback",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ExactText, ForeignKey("log_runs.id"), nullable=False),
    Column("turn", Integer),
    Column("span_start", Integer),
    Column("span_end", Integer),
    Column("kind", ExactText, nullable=False),
    Column("value", Double),
    Column("text", ExactText),
    Column("author", ExactText),
    Column("created", Double, nullable=False),
    Index("log_feedback_run", "run_id"),
)

given_tools = Table(
    "log_given_tools",
    metadata,
    Column("hash", ExactText, primary_key=True),
    Column("name", ExactText, nullable=False),
    Column("spec", Json, nullable=False),
    Column("first_seen", Double, nullable=False),
    Index("log_given_tools_name", "name"),
)

unneeded = Table(  # blobs of deleted runs that are still to be removed, if nothing else needs them
    "log_unneeded",
    metadata,
    Column("blob", ExactText, primary_key=True),
)

notes = Table(  # beside it an index of its text: log_notes_text in SQLite, the column `words` in Postgres
    "log_notes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("project", ExactText, nullable=False),
    Column("text", ExactText, nullable=False),
    Column("run_id", ExactText, nullable=False),  # no foreign key: the run may be deleted or in another log
    Column("turn", Integer, nullable=False),
    Column("private", Boolean, nullable=False),
    Column("created", Double, nullable=False),
    Index("log_notes_project", "project"),
)

NOTES_INDEX = {
    "sqlite": (
        "CREATE VIRTUAL TABLE log_notes_text USING fts5(text, content='log_notes', content_rowid='id')",
        "CREATE TRIGGER log_notes_added AFTER INSERT ON log_notes BEGIN"
        " INSERT INTO log_notes_text(rowid, text) VALUES (new.id, new.text); END",
        "CREATE TRIGGER log_notes_deleted AFTER DELETE ON log_notes BEGIN"
        " INSERT INTO log_notes_text(log_notes_text, rowid, text) VALUES ('delete', old.id, old.text); END",
        "CREATE TRIGGER log_notes_edited AFTER UPDATE ON log_notes BEGIN"
        " INSERT INTO log_notes_text(log_notes_text, rowid, text) VALUES ('delete', old.id, old.text);"
        " INSERT INTO log_notes_text(rowid, text) VALUES (new.id, new.text); END",
    ),
    "postgresql": (
        "ALTER TABLE log_notes ADD COLUMN words tsvector"
        " GENERATED ALWAYS AS (to_tsvector('simple', text)) STORED",
        "CREATE INDEX log_notes_words ON log_notes USING gin (words)",
    ),
}
"""dialect -> statements that make the index of the notes' words"""


messages_show = sa.type_coerce(turns.c.messages, sa.Text).contains('"images": [')
"""whether a turn's own messages show images; in a text the quotes would be escaped"""
Columns = dict[str, Any]
HINT = "see `nano-coder log list`"

_RUN_FIELDS = (
    "id", "policy", "profile", "profile_hash", "template_hash", "tools_hash", "runtime_version", "parent",
    "parent_step", "seed", "snapshot", "started", "ended", "stop", "stop_detail", "answer", "diff",
    "directory", "owner", "project", "share",
)  # fmt: skip
_TURN_FIELDS = (
    "thought", "parse_error", "parser", "repairs", "snapshot", "started", "ended", "delegated_by",
)  # fmt: skip
_OBSERVATION_FIELDS = (
    "tool", "ok", "text", "exit_code", "signal", "timed_out", "bytes_total", "truncated", "blob",
    "files_changed", "started", "ended",
)  # fmt: skip
_VERDICT_FIELDS = (
    "reward", "components", "turn_rewards", "checks", "failure_kind", "trust", "grader", "graded_hash",
)  # fmt: skip


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


def task_row(task: Task) -> Columns:
    return {
        "id": task.id,
        "key": task.key,
        "prompt": task.prompt,
        "split": task.split,
        "level": task.level,
        "family": task.family,
        "body": task.model_dump(),
    }


def run_row(trajectory: Trajectory, task_id: str) -> Columns:
    given = [tool_hash(tool) for tool in trajectory.given_tools] or None
    fields = {name: getattr(trajectory, name) for name in _RUN_FIELDS}
    return {"task_id": task_id, "given_tools": given} | fields


def tool_hash(tool: ToolSpec) -> str:
    """What a given tool is known by in the log."""
    return content_hash(tool.model_dump(mode="json"))


def turn_row(run_id: str, turn: Turn) -> Columns:
    completion = turn.completion
    row = {
        "run_id": run_id,
        "turn": turn.index,
        "policy_id": completion.policy_id,
        "policy_version": completion.policy_version,
        "finish": completion.finish,
        "sampling": completion.sampling.model_dump(),
        "text": completion.text,
        "api": completion.api.model_dump() if completion.api else None,
    }
    if turn.messages:
        row["messages"] = [message.model_dump() for message in turn.messages]
    return row | _token_columns(completion.tokens) | {name: getattr(turn, name) for name in _TURN_FIELDS}


def _token_columns(tokens: TurnTokens | None) -> Columns:
    if tokens is None:
        return {}
    return {
        "token_row": tokens.row,
        "context_tokens": len(tokens.context_ids),
        "sampled_tokens": len(tokens.sampled_ids),
        "context_ids": tokens.context_ids,
        "sampled_ids": tokens.sampled_ids,
        "logprobs": tokens.logprobs,
    }


def tool_call_rows(run_id: str, turn: Turn) -> list[Columns]:
    """One row for each position that holds a call, an observation or both."""
    rows = []
    for position in range(max(len(turn.calls), len(turn.observations))):
        row: Columns = {"run_id": run_id, "turn": turn.index, "position": position}
        row |= _call_columns(turn.calls[position] if position < len(turn.calls) else None)
        row |= observation_columns(turn.observations[position] if position < len(turn.observations) else None)
        rows.append(row)
    return rows


def _call_columns(call: ToolCall | None) -> Columns:
    if call is None:
        return {"call_name": None, "arguments": None}
    return {"call_name": call.name, "arguments": call.arguments}


def observation_columns(observation: Observation | None) -> Columns:
    denied = observation.denials if observation else None
    row: Columns = {name: getattr(observation, name, None) for name in _OBSERVATION_FIELDS}
    shown = observation.images if observation else ()
    row["images"] = [image.model_dump() for image in shown] or None
    return row | {f"denied_{name}": getattr(denied, name, None) for name in Denials.model_fields}


def verdict_row(run_id: str, verdict: Verdict, created: float) -> Columns:
    row = {
        "run_id": run_id,
        "created": created,
        "tampering": [found.model_dump() for found in verdict.tampering],
        "check_run": verdict.check_run.model_dump() if verdict.check_run else None,
    }
    return row | {name: getattr(verdict, name) for name in _VERDICT_FIELDS}


def verdict_seal(run_id: str, task_id: str, row: Mapping[Any, Any]) -> str:
    """Content hash of a verdict with what it judged: the run, the task with its checks, and in `graded_hash`
    the files or the answer. `row` holds a verdict's columns."""
    judged = {name: row[name] for name in (*_VERDICT_FIELDS, "tampering", "check_run")}
    return content_hash([run_id, task_id, judged])


def feedback_row(run_id: str, feedback: Feedback) -> Columns:
    start, end = feedback.span or (None, None)
    return {"run_id": run_id, "span_start": start, "span_end": end} | feedback.model_dump(exclude={"span"})


def feedback_from(row: RowMapping) -> Feedback:
    names = ("kind", "value", "text", "turn", "author", "created")
    span = None if row["span_start"] is None else (row["span_start"], row["span_end"])
    return Feedback(span=span, **{name: row[name] for name in names})


def said_from(row: RowMapping) -> Said:
    return Said(id=row["id"], run=row["run_id"], feedback=feedback_from(row))


def verdict_from(row: RowMapping) -> Verdict:
    others = {name: row[name] for name in _VERDICT_FIELDS}
    return Verdict(tampering=row["tampering"], check_run=row["check_run"], **others)


def trajectory_from(
    run: RowMapping,
    turns: Sequence[RowMapping],
    calls: Sequence[RowMapping],
    verdict: RowMapping | None,
    given_tools: tuple[ToolSpec, ...] = (),
) -> Trajectory:
    """`run` includes the task's `body`; turns and calls are in order."""
    by_turn: dict[int, list[RowMapping]] = {}
    for call in calls:
        by_turn.setdefault(call["turn"], []).append(call)
    return Trajectory(
        task=Task.model_validate(run["body"]),
        turns=tuple(_turn_from(turn, by_turn.get(turn["turn"], [])) for turn in turns),
        verdict=verdict_from(verdict) if verdict else None,
        given_tools=given_tools,
        **{name: run[name] for name in _RUN_FIELDS},
    )


def _turn_from(row: RowMapping, calls: list[RowMapping]) -> Turn:
    return Turn(
        index=row["turn"],
        messages=row["messages"] or (),
        completion=Completion(
            text=row["text"],
            finish=row["finish"],
            tokens=_tokens_from(row),
            sampling=row["sampling"],
            policy_id=row["policy_id"],
            policy_version=row["policy_version"],
            api=ApiAnswer.model_validate(row["api"]) if row["api"] else None,
        ),
        calls=tuple(
            ToolCall(name=call["call_name"], arguments=call["arguments"])
            for call in calls
            if call["call_name"] is not None
        ),
        observations=tuple(_observation_from(call) for call in calls if call["ok"] is not None),
        **{name: row[name] for name in _TURN_FIELDS},
    )


def _tokens_from(row: RowMapping) -> TurnTokens | None:
    if row["token_row"] is None:
        return None
    return TurnTokens(
        row=row["token_row"],
        context_ids=row["context_ids"],
        sampled_ids=row["sampled_ids"],
        logprobs=row["logprobs"],
    )


def _observation_from(row: RowMapping) -> Observation:
    denials = Denials(**{name: row[f"denied_{name}"] for name in Denials.model_fields})
    fields = {name: row[name] for name in _OBSERVATION_FIELDS}
    return Observation(denials=denials, images=row["images"] or (), **fields)


# ------------------------------------------------------------------------------------------- reading


def load(connection: sa.Connection, run_id: str) -> Trajectory:
    """A whole run. Raises LogError if its rows are damaged."""

    def rows(query: sa.Select[Any]) -> Sequence[sa.RowMapping]:
        return connection.execute(query).mappings().all()

    newest = sa.select(verdicts).where(verdicts.c.run_id == run_id).order_by(verdicts.c.id.desc()).limit(1)
    try:
        row = rows(sa.select(runs, tasks.c.body).join(tasks).where(runs.c.id == run_id))[0]
        return trajectory_from(
            row,
            rows(sa.select(turns).where(turns.c.run_id == run_id).order_by(turns.c.turn)),
            rows(
                sa.select(tool_calls)
                .where(tool_calls.c.run_id == run_id)
                .order_by(tool_calls.c.turn, tool_calls.c.position)
            ),
            next(iter(rows(newest)), None),
            tools_by_hash(connection, row["given_tools"]),
        )
    except (ValueError, struct.error) as damage:
        cause = damage.errors()[0]["msg"] if isinstance(damage, ValidationError) else str(damage)
        raise LogError(
            f"run {run_id} is damaged in the log ({cause}); `nano-coder log verify {run_id}` says more"
        ) from damage


def tools_by_hash(connection: sa.Connection, hashes: Sequence[str] | None) -> tuple[ToolSpec, ...]:
    """The tools of these hashes. Raises ValueError for one that the log lost."""
    table = given_tools
    query = sa.select(table.c.hash, table.c.spec).where(table.c.hash.in_(hashes or ()))
    found = {row.hash: row.spec for row in connection.execute(query)} if hashes else {}
    if missing := set(hashes or ()) - found.keys():
        raise ValueError(f"the tool {min(missing)} that it was given is missing")
    return tuple(ToolSpec.model_validate(found[each]) for each in hashes or ())


def verdicts_of(connection: sa.Connection, run_id: str) -> tuple[Verdict, ...]:
    """Every verdict of a run, newest last."""
    table = verdicts
    query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
    return tuple(map(verdict_from, connection.execute(query).mappings()))


def feedback_of(connection: sa.Connection, run_id: str) -> tuple[Feedback, ...]:
    """The feedback of a run, in order of arrival."""
    table = feedback
    query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
    return tuple(map(feedback_from, connection.execute(query).mappings()))


# ------------------------------------------------------------------------------------------- writing


# compiled once: SQLAlchemy caches on the statement, and compiling costs more than SQLite's own work
_RUN = sa.bindparam("run", type_=runs.c.id.type)
_RUN_IS_THERE = sa.select(sa.literal(1)).where(runs.c.id == _RUN)
# locks the row where databases do: a deletion must not take the task before its run is there
_TASK_IS_THERE = (
    sa.select(sa.literal(1))
    .where(tasks.c.id == sa.bindparam("task"))
    .with_for_update(of=tasks, read=True, key_share=True)
)
_TURN_COUNT = sa.select(sa.func.count()).where(turns.c.run_id == _RUN)
_STOP_AND_TURNS = (
    sa.select(runs.c.stop, _TURN_COUNT.scalar_subquery()).where(runs.c.id == _RUN).with_for_update(of=runs)
)
_ADD_RUN, _ADD_TURN, _ADD_CALL = (table.insert() for table in (runs, turns, tool_calls))


def is_there(connection: sa.Connection, run_id: str) -> bool:
    return connection.scalar(_RUN_IS_THERE, {"run": run_id}) is not None


def insert_run(connection: sa.Connection, trajectory: Trajectory) -> None:
    task_id = insert_task(connection, trajectory.task)
    if is_there(connection, trajectory.id):
        raise LogError(f"run {trajectory.id} is already in the log; {HINT}")
    insert_given_tools(connection, trajectory)
    connection.execute(_ADD_RUN, run_row(trajectory, task_id))


def insert_given_tools(connection: sa.Connection, trajectory: Trajectory) -> None:
    """Add the tools that the run was given and the log does not hold yet."""
    table = given_tools
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
                connection.execute(tasks.insert(), row)
        except IntegrityError:  # on a server another process may be first, with the same: the id is a hash
            pass
    return str(row["id"])


def insert_turns(
    connection: sa.Connection, run_id: str, turns: Sequence[Turn], *, logged_turns: int = 0
) -> None:
    """Add turns to a run that has `logged_turns` turns. Raises LogError for a turn out of order."""
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


def insert_verdict(connection: sa.Connection, run_id: str, verdict: Verdict) -> None:
    state_of(connection, run_id)
    row = verdict_row(run_id, verdict, time.time())
    task_id = connection.scalar(sa.select(runs.c.task_id).where(runs.c.id == run_id))
    seal = verdict_seal(run_id, str(task_id), row)
    connection.execute(verdicts.insert(), row | {"seal": seal})


def insert_feedback(connection: sa.Connection, run_id: str, given: Feedback) -> int:
    """Returns the id of the row."""
    state_of(connection, run_id)
    done = connection.execute(feedback.insert(), feedback_row(run_id, given))
    return int(done.inserted_primary_key[0])  # type: ignore[index]


def refuse_ended(connection: sa.Connection, run_id: str) -> int:
    """Raises LogError for an unknown or ended run. Returns the number of its turns."""
    stop, turns = state_of(connection, run_id)
    if stop is not None:
        raise LogError(f"run {run_id} has ended with {stop.value!r}; resume or fork it")
    return turns


def state_of(connection: sa.Connection, run_id: str) -> tuple[StopReason | None, int]:
    """Why the run ended, and the number of its turns. Raises LogError for an unknown run.

    Locks the run's row where the database locks rows, so that writers of one run take turns.
    """
    row = connection.execute(_STOP_AND_TURNS, {"run": run_id}).one_or_none()
    if row is None:
        raise LogError(f"no run {run_id!r} in the log; {HINT}")
    stop, turns = row
    return None if stop is None else StopReason(stop), turns
