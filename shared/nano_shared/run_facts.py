"""Facts of a run: everything that decides whether it may train, from the log's columns as they are stored.

No turn is validated and no context is read, so that a hundred thousand runs take seconds, and damage is a
fact too. `facts_of` gives the facts of a run in memory, by the same columns.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from nano_shared import schema
from nano_shared.errors import UsageError
from nano_shared.logged_run import LoggedRun
from nano_shared.owners import User, project_of
from nano_shared.schema import tools_by_hash, turn_row, verdict_row, verdict_seal
from nano_shared.types import (
    EDIT_LINE,
    REDACTED_ID,
    SUMMARY,
    Sampling,
    StopReason,
    Task,
    ToolSpec,
    Trajectory,
    Turn,
    Verdict,
    group_key,
)

if TYPE_CHECKING:
    from nano_shared.store import LogStore

OPINIONS = ("accept", "reject", "edit", "thumb", "prefer")
"""kinds of feedback that rate a run"""
_BATCH = 200
"""number of runs whose turns are in memory at once"""
_ID_BYTES, _LOGPROB_BYTES = 4, 8
_HIDDEN = REDACTED_ID.to_bytes(_ID_BYTES, "little")
_JUDGED = ("reward", "trust", "failure_kind", "grader", "graded_hash", "components", "tampering")
_SEALED = ("seal", "turn_rewards", "checks", "check_run")
"""further columns that the seal of a verdict is computed from"""
_RUN = (
    "id", "policy", "profile", "profile_hash", "template_hash", "tools_hash", "parent", "parent_step",
    "answer", "started", "owner", "share",
)  # fmt: skip
_TURN = (
    "turn", "policy_id", "policy_version", "token_row", "context_tokens", "sampled_tokens", "sampling",
    "text", "parse_error", "parser", "delegated_by", "started", "ended",
)  # fmt: skip
_STOPS = {reason.value: reason for reason in StopReason}
_Calls = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Selects runs of a log; the default selects all."""

    runs: tuple[str, ...] | None = None
    """ids"""
    task: str | None = None
    """shell pattern of the task's key"""
    since: float | None = None
    """unix seconds"""
    policy: str | None = None
    """a policy as the user named it, or the id of weights that sampled a turn"""
    directory: str | None = None
    """absolute path: runs there, and those of the same project (`project_of`) elsewhere"""
    user: User | None = None
    """who reads: hides what others share with nobody; None: hides nothing"""

    def select(self, *columns: Any, by_task: bool) -> sa.Select[Any]:
        """These columns of the selected runs and their tasks: by task key and oldest first, or oldest first.
        `task` is not looked at: see `takes`."""
        runs, tasks, turns = schema.runs, schema.tasks, schema.turns
        order = [tasks.c.key] if by_task else []
        query = sa.select(*columns).join_from(runs, tasks).order_by(*order, runs.c.started, runs.c.id)
        if self.runs is not None:
            query = query.where(runs.c.id.in_(self.runs))
        if self.since is not None:
            query = query.where(runs.c.started >= self.since)
        if self.policy is not None:
            sampled = sa.exists().where(turns.c.run_id == runs.c.id, turns.c.policy_id == self.policy)
            query = query.where(sa.or_(runs.c.policy == self.policy, sampled))
        if self.directory is not None:
            same = runs.c.project == project_of(self.directory)
            query = query.where(sa.or_(runs.c.directory == self.directory, same))
        return query if self.user is None else query.where(self.user.sees(runs.c))

    def takes(self, task_key: str) -> bool:
        return self.task is None or fnmatchcase(task_key, self.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRuns:
    """Selected runs of a log. Raises UsageError if runs are both named and filtered."""

    names: tuple[str, ...] = ()
    """ids, unique prefixes, or "last"; empty: every run that passes the filters"""
    task: str | None = None
    since: float | None = None
    policy: str | None = None
    successes: bool = False

    def __post_init__(self) -> None:
        if self.names and (self.task or self.since is not None or self.policy or self.successes):
            raise UsageError("name runs, or choose them by --task, --since, --policy, --successes: not both")

    def read(self, store: LogStore) -> Iterator[LoggedRun]:
        """The runs in the order given, or oldest first. Raises LogError for an unknown name."""
        named = dict.fromkeys(store.resolve(name) for name in self.names)
        for run_id in named or [run_id for run_id, _ in self.ids(store)]:
            run = store.logged(run_id)
            if not self.successes or succeeded(run.trajectory):
                yield run

    def ids(self, store: LogStore, *, by_task: bool = False) -> list[tuple[str, str]]:
        """Id and task key of the runs that pass the filters, without loading a run; ignores `successes`."""
        chosen = RunFilter(task=self.task, since=self.since, policy=self.policy)
        return store.ids(chosen, by_task=by_task)


def succeeded(run: Trajectory) -> bool:
    """Whether the run ended by itself, with the full reward and without tampering."""
    ended = run.stop is not None and not run.stop.ours
    verdict = run.verdict
    return ended and verdict is not None and (verdict.reward or 0.0) >= 1.0 and not verdict.tampering


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def moment(text: str | None, *, now: float | None = None, option: str = "--since") -> float | None:
    """Unix seconds of a date, a date and time, unix seconds, or so long ago as 90m. Raises UsageError."""
    if text is None:
        return None
    text = text.strip()
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return (time.time() if now is None else now) - float(ago[1]) * _SECONDS[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option} {text!r} is no time; write a date (2026-11-20), a time (2026-11-20T09:30), or so long"
            " ago (90m, 12h, 7d, 2w)"
        ) from None


def _column(name: str) -> Any:
    """A property: the column of that name, as the log holds it."""
    return property(lambda facts: facts.columns[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    columns: Mapping[str, Any]
    """of the turn's row (`_turns`); sampled ids and log-probs are bytes"""
    calls: _Calls
    refused: bool = False
    """whether a tool refused a call of it, or no call could be read"""
    shows: bool = False
    """whether its messages or observations show images"""

    index = _column("turn")
    policy_id = _column("policy_id")
    policy_version = _column("policy_version")
    text = _column("text")
    delegated_by = _column("delegated_by")
    parser = _column("parser")
    parse_error = _column("parse_error")

    @property
    def row(self) -> int | None:
        """None where the turn has no tokens."""
        return None if self.columns["sampled_ids"] is None else self.columns["token_row"]

    @property
    def _ids(self) -> bytes:
        return self.columns["sampled_ids"] or b""

    @property
    def context(self) -> int:
        """Number of context tokens, as stored."""
        return int(self.columns["context_bytes"] or 0) // _ID_BYTES

    @property
    def sampled(self) -> int:
        return len(self._ids) // _ID_BYTES

    @property
    def claimed(self) -> tuple[int, int]:
        """Numbers of context and sampled tokens that were counted when the turn was written."""
        return self.columns["context_tokens"] or 0, self.columns["sampled_tokens"] or 0

    @property
    def is_whole(self) -> bool:
        """Whether the stored bytes are whole ids and log-probs."""
        logprobs, context = self.columns["logprobs"] or b"", self.columns["context_bytes"] or 0
        return len(self._ids) % _ID_BYTES == len(logprobs) % _LOGPROB_BYTES == context % _ID_BYTES == 0

    @property
    def logprobs(self) -> array[float]:
        blob = self.columns["logprobs"] or b""
        values = array("d", blob[: len(blob) // _LOGPROB_BYTES * _LOGPROB_BYTES])
        if sys.byteorder == "big":
            values.byteswap()  # the log is little-endian
        return values

    @property
    def is_redacted(self) -> bool:
        """Whether an id of context or sample was redacted."""
        return bool(self.columns["hides"]) or _HIDDEN in self._ids

    @property
    def sampling(self) -> Sampling:
        return Sampling.model_construct(**self.columns["sampling"])

    @property
    def is_summary(self) -> bool:
        """Whether it summarises its row: calls in its text were not executed."""
        return bool(self.columns["parser"] == SUMMARY)

    @property
    def no_tokens(self) -> str | None:
        """Why a server's answer has no tokens, as far as is known."""
        return (self.columns["api"] or {}).get("no_tokens")

    @property
    def draw(self) -> bytes:
        """Digest of what was sampled and when: equal for copies of a turn, different for any two samples.

        What distinguishes two samples with the same ids is seed and policy, since reusing a seed gives no new
        sample; without a seed, the times in unix seconds.
        """
        seed, of = self.columns["sampling"].get("seed"), self.columns
        # databases do not keep a minus zero
        times = (of["started"] + 0.0, of["ended"] + 0.0)
        stamp = repr(times if seed is None else (self.policy_id, seed))
        digest = hashlib.blake2b(stamp.encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(self.text.encode("utf-8", "surrogatepass") if self.row is None else self._ids)
        return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    columns: Mapping[str, Any]
    """`_RUN` of the run's row"""
    task: Task
    task_id: str
    """content hash of the task as its environment lists it"""
    stop: StopReason | None
    turns: tuple[TurnFacts, ...]
    verdict: Verdict | None
    """the newest, not validated, without `checks`, `turn_rewards` and `check_run`"""
    sealed: bool | None = field(default=None, compare=False)
    """whether its row is as it was written; None: not read from a log, or written before there were seals"""
    given_tools: tuple[ToolSpec, ...] = ()
    """tools beside those of the profile"""
    opinions: bool = False
    """whether feedback rates the run"""
    withheld: bool = False
    """whether it is of an owner who lets no other user learn from it"""

    id = _column("id")
    policy = _column("policy")
    profile = _column("profile")
    profile_hash = _column("profile_hash")
    template_hash = _column("template_hash")
    tools_hash = _column("tools_hash")
    parent = _column("parent")
    parent_step = _column("parent_step")
    answer = _column("answer")
    owner = _column("owner")
    started = _column("started")

    @property
    def own_turns(self) -> tuple[TurnFacts, ...]:
        """The turns, without those that a fork took over from its parent."""
        return self.turns[self.parent_step or 0 :]

    @property
    def group_key(self) -> str:
        """`Trajectory.group_key`"""
        return group_key(self.task.key, self.parent, self.parent_step)

    @property
    def shows_images(self) -> bool:
        return bool(self.task.images) or any(turn.shows for turn in self.turns)

    @property
    def has_tokens(self) -> bool:
        return bool(self.turns) and all(turn.row is not None for turn in self.turns)

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if self.verdict else None

    @property
    def draw(self) -> bytes:
        """Digest of the whole run: equal for copies of one execution, whatever their ids."""
        digest = hashlib.blake2b(digest_size=16)
        for turn in self.turns:
            digest.update(turn.draw)
        return digest.digest()


def facts_of(run: Trajectory) -> RunFacts:
    """The facts of a run in memory."""
    return RunFacts(
        task=run.task, task_id=run.task.listed.id, stop=run.stop, given_tools=run.given_tools,
        turns=tuple(
            TurnFacts(
                columns=_stored(turn), calls=tuple((call.name, call.arguments) for call in turn.calls),
                refused=turn.refused, shows=any(one.images for one in (*turn.messages, *turn.observations)),
            )
            for turn in run.turns
        ),
        verdict=_verdict(verdict_row(run.id, run.verdict, 0.0)) if run.verdict else None,
        columns={name: getattr(run, name) for name in _RUN},
    )  # fmt: skip


def stream_facts(connection: sa.Connection, chosen: RunFilter) -> Iterator[RunFacts]:
    """Facts of the selected runs, sorted by task key, then oldest first."""
    streaming = connection.execution_options(stream_results=True, yield_per=_BATCH)
    rows = (row for row in streaming.execute(_runs(chosen)) if chosen.takes(row.key))
    # runs of a task follow each other, and those of a project share their tools
    task_of = lru_cache(maxsize=1)(partial(_stored_task, connection))
    tools_of = cache(partial(_given_tools, connection))
    while batch := list(islice(rows, _BATCH)):
        turns = _turns(connection, [row.id for row in batch])
        for row in batch:
            columns = {name: getattr(row, f"verdict_{name}") for name in (*_JUDGED, *_SEALED)}
            seal = columns["seal"]
            task, task_id = task_of(row.task_id, row.key)
            yield RunFacts(
                task=task, task_id=task_id, stop=_STOPS.get(row.stop), turns=tuple(turns.get(row.id, ())),
                verdict=None if columns["trust"] is None else _verdict(columns),
                sealed=None if seal is None else seal == verdict_seal(row.id, row.task_id, columns),
                opinions=bool(row.opinions), given_tools=tools_of(tuple(row.given_tools or ())),
                withheld=chosen.user is not None and not chosen.user.may_learn(row.owner, row.share),
                columns={name: getattr(row, name) for name in _RUN},
            )  # fmt: skip


def _runs(chosen: RunFilter) -> sa.Select[Any]:
    runs, tasks, verdicts, feedback = schema.runs, schema.tasks, schema.verdicts, schema.feedback
    later = verdicts.alias()
    newest = sa.select(sa.func.max(later.c.id)).where(later.c.run_id == runs.c.id).correlate(runs)
    opinions = sa.exists().where(feedback.c.run_id == runs.c.id, feedback.c.kind.in_(OPINIONS))
    query = chosen.select(
        *(runs.c[name] for name in (*_RUN, "task_id", "stop", "given_tools")), tasks.c.key,
        opinions.label("opinions"),
        *(verdicts.c[name].label(f"verdict_{name}") for name in (*_JUDGED, *_SEALED)),
        by_task=True,
    )  # fmt: skip
    return query.outerjoin(verdicts, verdicts.c.id == newest.scalar_subquery())


def _stored_task(connection: sa.Connection, stored: str, key: str) -> tuple[Task, str]:
    """The task of a row, and its content hash as it was listed. A damaged one has its key alone."""
    query = sa.select(schema.tasks.c.body).where(schema.tasks.c.id == stored)
    try:
        task = Task.model_validate(connection.scalar(query))
    except ValueError:
        task = Task.model_construct(key=key, prompt="")
    listed = task.listed
    return task, stored if listed is task else listed.id


def _given_tools(connection: sa.Connection, hashes: tuple[str, ...]) -> tuple[ToolSpec, ...]:
    """None of them where one is damaged or lost."""
    try:
        return tools_by_hash(connection, hashes)
    except ValueError:
        return ()


def _turns(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[TurnFacts]]:
    turns, calls = schema.turns, schema.tool_calls
    raw = sa.LargeBinary()
    query = (
        sa.select(
            *(turns.c[name] for name in ("run_id", *_TURN)),
            sa.func.length(turns.c.context_ids).label("context_bytes"),
            _hides(connection, sa.type_coerce(turns.c.context_ids, raw)).label("hides"),
            *(sa.type_coerce(turns.c[name], raw).label(name) for name in ("sampled_ids", "logprobs")),
            sa.case((turns.c.token_row.is_(None), turns.c.api)).label("api"),
            schema.messages_show.label("shows"),
        )
        .where(turns.c.run_id.in_(ids))
        .order_by(turns.c.run_id, turns.c.turn)
    )  # fmt: skip
    refused = calls.c.ok.is_(False) & calls.c.timed_out.is_(False)
    nothing_ran = calls.c.exit_code.is_(None) & calls.c.signal.is_(None)
    refused &= nothing_ran | (calls.c.tool == EDIT_LINE)
    kept = (calls.c.run_id, calls.c.turn, calls.c.call_name, calls.c.arguments, refused)
    of_turns = (
        sa.select(*kept, calls.c.images.is_not(None))
        .where(calls.c.run_id.in_(ids))
        .order_by(calls.c.run_id, calls.c.turn, calls.c.position)
    )
    of_calls = groupby(connection.execute(of_turns), key=lambda row: (row[0], row[1]))
    by_turn = {key: [tuple(row[2:]) for row in group] for key, group in of_calls}
    found: dict[str, list[TurnFacts]] = {}
    for row in connection.execute(query):
        columns = {name: value for name, value in row._mapping.items() if name not in ("run_id", "shows")}
        rows = by_turn.get((row.run_id, row.turn), ())
        found.setdefault(row.run_id, []).append(
            TurnFacts(
                columns=columns,
                calls=tuple((name, given) for name, given, *_ in rows if name is not None),
                refused=row.parse_error is not None or any(seen for _, _, seen, _ in rows),
                shows=bool(row.shows) or any(shown for *_, shown in rows),
            )
        )
    return found


def _hides(connection: sa.Connection, column: sa.ColumnElement[bytes]) -> sa.ColumnElement[bool]:
    """SQL expression: whether packed ids contain the placeholder of redacted ids."""
    if connection.dialect.name == "sqlite":
        return sa.func.instr(column, _HIDDEN) > 0
    return sa.func.position(sa.literal(_HIDDEN, sa.LargeBinary()).op("IN")(column)) > 0


def _stored(turn: Turn) -> dict[str, Any]:
    """The columns of a turn as `_turns` selects them."""
    row = turn_row("", turn)
    packed = {
        name: schema.turns.c[name].type.process_bind_param(row.get(name), None)  # type: ignore[attr-defined]
        for name in ("context_ids", "sampled_ids", "logprobs")
    }
    context = packed.pop("context_ids")
    columns = {name: row.get(name) for name in _TURN} | packed
    columns["context_bytes"] = None if context is None else len(context)
    columns["hides"] = None if context is None else _HIDDEN in context
    kept = row["sampling"], row["api"] if row.get("token_row") is None else None
    columns["sampling"], columns["api"] = json.loads(json.dumps(kept))
    return columns


def _verdict(columns: Any) -> Verdict:
    return Verdict.model_construct(**{name: columns[name] for name in _JUDGED})
