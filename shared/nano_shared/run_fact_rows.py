"""Streams the facts of runs from a log's columns, in constant memory and without validation."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from itertools import groupby, islice
from typing import Any

import sqlalchemy as sa

from nano_shared import schema
from nano_shared.rows import verdict_seal
from nano_shared.run_facts import OPINIONS, RunFacts, TaskFacts, TurnFacts, VerdictFacts, draw_digest
from nano_shared.run_queries import given_tools
from nano_shared.types import REDACTED_ID, SUMMARY, StopReason, Task, ToolSpec

_BATCH = 200
"""number of runs whose turns are in memory at once"""
_ID_BYTES, _LOGPROB_BYTES = 4, 8
_HIDDEN = REDACTED_ID.to_bytes(_ID_BYTES, "little")
_JUDGED = tuple(field.name for field in fields(VerdictFacts) if field.name != "sealed")
_SEALED = ("seal", "turn_rewards", "checks", "check_run")
"""further columns that the seal of a verdict is computed from"""
_STOPS = {reason.value: reason for reason in StopReason}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Selects runs of a log; the default selects all."""

    run: str | None = None
    """id"""
    runs: tuple[str, ...] | None = None
    """ids"""
    task: str | None = None
    """shell pattern of the task's key"""
    since: float | None = None
    """unix seconds"""
    policy: str | None = None
    """a policy as the user named it, or the id of weights that sampled a turn"""


def stream_facts(connection: sa.Connection, chosen: RunFilter) -> Iterator[RunFacts]:
    """Facts of the selected runs, sorted by task key, then oldest first."""
    streaming = connection.execution_options(stream_results=True, yield_per=_BATCH)
    rows = streaming.execute(_runs(chosen))
    matching = (row for row in rows if chosen.task is None or fnmatchcase(row.key, chosen.task))
    tasks, given = _Tasks(connection), _GivenTools(connection)
    while batch := list(islice(matching, _BATCH)):
        ids = [row.id for row in batch]
        turns = _turns(connection, ids)
        for row in batch:
            yield _run_facts(row, tasks.of(row), tuple(turns.get(row.id, ())), given.of(row.given_tools))


def _runs(chosen: RunFilter) -> sa.Select[Any]:
    runs, tasks, verdicts, feedback = schema.runs, schema.tasks, schema.verdicts, schema.feedback
    later = verdicts.alias()
    newest = (
        sa.select(sa.func.max(later.c.id))
        .where(later.c.run_id == runs.c.id)
        .correlate(runs)
        .scalar_subquery()
    )
    opinions = sa.exists().where(feedback.c.run_id == runs.c.id, feedback.c.kind.in_(OPINIONS))
    names = ("id", "task_id", "policy", "profile", "profile_hash", "template_hash", "tools_hash", "parent",
             "parent_step", "stop", "answer", "started", "given_tools")  # fmt: skip
    query = (
        sa.select(
            *(runs.c[name] for name in names), tasks.c.key, tasks.c.split, opinions.label("opinions"),
            *(verdicts.c[name].label(f"verdict_{name}") for name in (*_JUDGED, *_SEALED)),
        )
        .join(tasks)
        .outerjoin(verdicts, verdicts.c.id == newest.scalar_subquery())
        .order_by(tasks.c.key, runs.c.started, runs.c.id)
    )  # fmt: skip
    if chosen.run is not None:
        query = query.where(runs.c.id == chosen.run)
    if chosen.runs is not None:
        query = query.where(runs.c.id.in_(chosen.runs))
    if chosen.since is not None:
        query = query.where(runs.c.started >= chosen.since)
    if chosen.policy is not None:
        turns = schema.turns
        sampled = sa.exists().where(turns.c.run_id == runs.c.id, turns.c.policy_id == chosen.policy)
        query = query.where(sa.or_(runs.c.policy == chosen.policy, sampled))
    return query


class _Tasks:
    """Reads each task's body once, since its runs follow each other."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._last: TaskFacts | None = None
        self._stored = ""
        """id of the row that `_last` was read from"""

    def of(self, row: Any) -> TaskFacts:
        if self._last is None or self._stored != row.task_id:
            query = sa.select(schema.tasks.c.body).where(schema.tasks.c.id == row.task_id)
            body = self._connection.scalar(query) or {}
            tools, hidden = body.get("tools"), body.get("hidden") or {}
            self._stored = row.task_id
            in_environment = hidden.get("kind") == "environment"
            self._last = TaskFacts(
                id=Task.model_validate(body).listed.id if in_environment else row.task_id,
                key=row.key,
                split=row.split,
                tools=None if tools is None else tuple(tools),
                generator=(body.get("provenance") or {}).get("generator"),
                answer_only=hidden.get("kind") == "answer",
            )
        return self._last


class _GivenTools:
    """Reads each set of given tools once: the runs of a project share theirs."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._known: dict[tuple[str, ...], tuple[ToolSpec, ...]] = {(): ()}

    def of(self, hashes: list[str] | None) -> tuple[ToolSpec, ...]:
        """None of them where one is damaged or lost."""
        key = tuple(hashes or ())
        if key not in self._known:
            try:
                self._known[key] = given_tools(self._connection, key)
            except ValueError:
                self._known[key] = ()
        return self._known[key]


def _turns(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[TurnFacts]]:
    turns = schema.turns
    raw = sa.LargeBinary()
    query = (
        sa.select(
            turns.c.run_id, turns.c.turn, turns.c.policy_id, turns.c.policy_version, turns.c.finish,
            turns.c.token_row, turns.c.context_tokens, turns.c.sampled_tokens,
            sa.func.length(turns.c.context_ids).label("context_bytes"),
            _hides(connection, sa.type_coerce(turns.c.context_ids, raw)).label("context_hidden"),
            sa.type_coerce(turns.c.sampled_ids, raw).label("sampled_ids"),
            sa.type_coerce(turns.c.logprobs, raw).label("logprobs"),
            turns.c.sampling, turns.c.text, turns.c.parser, turns.c.delegated_by, turns.c.started,
            turns.c.ended,
            sa.case((turns.c.token_row.is_(None), turns.c.api)).label("api"),
        )
        .where(turns.c.run_id.in_(ids))
        .order_by(turns.c.run_id, turns.c.turn)
    )  # fmt: skip
    calls = _calls(connection, ids)
    found: dict[str, list[TurnFacts]] = {}
    for row in connection.execute(query):
        found.setdefault(row[0], []).append(_turn_facts(row, calls.get((row[0], row[1]), ())))
    return found


_Calls = tuple[tuple[str, dict[str, Any]], ...]


def _calls(connection: sa.Connection, ids: Sequence[str]) -> dict[tuple[str, int], _Calls]:
    calls = schema.tool_calls
    query = (
        sa.select(calls.c.run_id, calls.c.turn, calls.c.call_name, calls.c.arguments)
        .where(calls.c.run_id.in_(ids), calls.c.call_name.is_not(None))
        .order_by(calls.c.run_id, calls.c.turn, calls.c.position)
    )
    rows = connection.execute(query)
    by_turn = groupby(rows, key=lambda row: (row[0], row[1]))
    return {key: tuple((row[2], row[3]) for row in group) for key, group in by_turn}


def _hides(connection: sa.Connection, column: sa.ColumnElement[bytes]) -> sa.ColumnElement[int]:
    """SQL expression: above 0 if packed ids contain the placeholder of redacted ids."""
    if connection.dialect.name == "sqlite":
        return sa.func.instr(column, _HIDDEN)
    return sa.func.position(sa.literal(_HIDDEN, sa.LargeBinary()).op("IN")(column))


def _turn_facts(row: Any, calls: _Calls) -> TurnFacts:
    (_, turn, policy_id, version, finish, token_row, context, count, context_bytes, hidden, ids, logprobs,
     sampling, text, parser, delegated_by, started, ended, api) = row  # fmt: skip
    bare = token_row is None or ids is None
    ids, logprobs, context_bytes = ids or b"", logprobs or b"", context_bytes or 0
    whole = len(ids) % _ID_BYTES == len(logprobs) % _LOGPROB_BYTES == context_bytes % _ID_BYTES == 0
    sampled = len(ids) // _ID_BYTES
    drawn = text.encode("utf-8", "surrogatepass") if bare else ids
    return TurnFacts(
        index=turn,
        policy_id=policy_id,
        policy_version=version,
        finish=finish,
        row=None if bare else token_row,
        context=context_bytes // _ID_BYTES,
        sampled=sampled,
        claimed=(context or 0, count or 0),
        whole=whole,
        redacted=bool(hidden) or _HIDDEN in ids,
        logprobs=_floats(logprobs),
        temperature=sampling.get("temperature", 1.0),
        filtered=sampling.get("top_p", 1.0) < 1 or sampling.get("top_k", 0) > 0,
        constrained=sampling.get("grammar") is not None or sampling.get("shaping") is not None,
        text=text,
        calls=calls,
        summary=parser == SUMMARY,
        delegated_by=delegated_by,
        draw=draw_digest(drawn, policy_id, sampling.get("seed"), started, ended),
        no_tokens=(api or {}).get("no_tokens"),
    )


def _floats(blob: bytes) -> array[float]:
    values = array("d", blob[: len(blob) // _LOGPROB_BYTES * _LOGPROB_BYTES])
    if sys.byteorder == "big":
        values.byteswap()  # the log is little-endian
    return values


def _run_facts(
    row: Any, task: TaskFacts, turns: tuple[TurnFacts, ...], given_tools: tuple[ToolSpec, ...]
) -> RunFacts:
    judged = None
    if row.verdict_trust is not None:
        columns = {name: getattr(row, f"verdict_{name}") for name in (*_JUDGED, *_SEALED)}
        seal = columns["seal"]
        judged = VerdictFacts(
            **{name: columns[name] for name in _JUDGED},
            sealed=None if seal is None else seal == verdict_seal(row.id, row.task_id, columns),
        )
    return RunFacts(
        id=row.id, task=task, policy=row.policy, profile=row.profile, profile_hash=row.profile_hash,
        template_hash=row.template_hash, tools_hash=row.tools_hash, parent=row.parent,
        parent_step=row.parent_step, stop=_STOPS.get(row.stop), answer=row.answer, started=row.started,
        turns=turns, verdict=judged, opinions=bool(row.opinions), given_tools=given_tools,
    )  # fmt: skip
