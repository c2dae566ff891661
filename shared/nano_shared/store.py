"""LogStore: the log of every execution, written ahead turn by turn, and read back exactly. The only user of
SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError

from nano_shared import schema
from nano_shared.agent_notes import Notes, Scrub
from nano_shared.database import Database, open_database
from nano_shared.errors import LogError, NanoError
from nano_shared.files import new_run_id
from nano_shared.logged_run import Feedback, LoggedRun, Said
from nano_shared.owners import EVERYBODY, User, project_of
from nano_shared.run_facts import RunFacts, RunFilter, stream_facts
from nano_shared.schema import HINT, ClientRequest, ExactText
from nano_shared.snapshot import BlobStore, blobs_of, open_blobs
from nano_shared.types import (
    CLIENT_TOOLS,
    Observation,
    StopReason,
    Task,
    ToolSpec,
    Trajectory,
    Turn,
    Value,
    Verdict,
)

T = TypeVar("T")

__all__ = ["LogStore", "SqlResult", "new_run_id"]


class RunSummary(Value):
    """A run as the view `runs` shows it."""

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
    owner: str | None = None


# times and counts are as in the view; text needs the type that undoes its escapes
_texts = {"id", "task_key", "prompt", "policy", "policy_id", "stop", "owner", "share"}
_shown = tuple(RunSummary.model_fields)
_summaries = sa.table(
    "runs", *(sa.column(name, ExactText if name in _texts else None) for name in (*_shown, "share"))
)
_AMBIGUOUS_SHOWN = 3
_MOST_ANSWERS = 64
"""of equal conversations: all that matters is whether they were sampled alike"""


@dataclass(slots=True)
class Merged:
    """Result of an import, in runs."""

    added: int = 0
    extended: int = 0
    """existed, and gained verdicts or feedback"""
    known: int = 0
    """existed already, with all that the file has"""


@dataclass(frozen=True, slots=True)
class SqlResult:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class LogStore:
    """The log of runs. Append-only. Safe for many threads, and for several processes on one log.

    Every method raises LogError if the log is locked for too long, damaged, read-only or out of space.
    """

    def __init__(self, database: Database, blobs: BlobStore | None = None, user: User | None = None) -> None:
        """Without `blobs` they are in the database's own folder."""
        self.database = database
        self._blobs = blobs
        self.user = user
        """whose the runs are that are added, and who is shown others; None: nobody's, and all are shown"""

    @classmethod
    def open(
        cls,
        url: str | Path | None = None,
        *,
        create: bool = True,
        blobs: str | Path | None = None,
        user: User | None = None,
    ) -> LogStore:
        """Open a log by path or SQLAlchemy URL; None is `log.db` in NANO_HOME. Applies missing migrations.

        Blobs are at the address `blobs`, or that of the URL's `?blobs=` (see `open_blobs`), else in `blobs/`
        beside an SQLite file, and in NANO_HOME for a server.
        Raises LogError for a file that is no log, is newer than this program, or cannot be written.
        """
        database = open_database(url, create=create)
        address = blobs or database.blobs
        return cls(database, open_blobs(address) if address else None, user)

    @property
    def blobs(self) -> BlobStore:
        if self._blobs is None:
            self._blobs = BlobStore(self.database.folder.absolute() / "blobs")
        return self._blobs

    @property
    def url(self) -> str:
        """Path of the SQLite file, or the URL without its password."""
        return self.database.name

    def stamp(self) -> tuple[int, ...] | None:
        """Numbers that change with every write to the log, read without asking it; None for a server."""
        return self.database.stamp()

    @property
    def address(self) -> str:
        """The argument to `open` it again, password included: for our own processes, never to be shown."""
        return self.database.address

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> LogStore:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ writing

    def begin(self, trajectory: Trajectory) -> None:
        """Begin a run, with the turns of its parent if it is a fork, in one transaction.

        Raises LogError if its id is taken, or if it already holds turns of its own or an end.
        """
        if trajectory.own_turns or trajectory.stop is not None or trajectory.verdict is not None:
            raise LogError(f"run {trajectory.id} has already been executed; append() takes it whole")
        if len(trajectory.turns) != trajectory.inherited:
            raise LogError(
                f"run {trajectory.id} is to begin with {trajectory.inherited} turns of its parent,"
                f" and holds {len(trajectory.turns)}"
            )

        signed = self._signed(trajectory)

        def work(connection: sa.Connection) -> None:
            schema.insert_run(connection, signed)
            schema.insert_turns(connection, signed.id, signed.turns)

        self.database.write(work)

    def _signed(self, run: Trajectory) -> Trajectory:
        """The run as the user's own, where it has no owner yet, and with its project."""
        if (user := self.user) is None:
            return run
        project = run.project or (project_of(run.directory) if run.directory else None)
        signed = {"owner": run.owner or user.name, "share": run.share or user.share, "project": project}
        return run.model_copy(update=signed)

    def append_turn(self, run_id: str, turn: Turn, request: ClientRequest | None = None) -> None:
        """Add the next turn, and the client's request that it answers.

        Raises LogError for an unknown or ended run, and for a turn out of order.
        """

        def work(connection: sa.Connection) -> None:
            count = schema.refuse_ended(connection, run_id)
            if count != turn.index:
                # a server counts before it waits for the run's lock, so that another's turn may be missing
                count = schema.state_of(connection, run_id)[1]
            try:
                schema.insert_turns(connection, run_id, (turn,), logged_turns=count)
            except IntegrityError:
                raise LogError(
                    f"another process has logged turn {turn.index} of run {run_id} meanwhile"
                ) from None
            if request is not None:
                row = {"run_id": run_id, "turn": turn.index, **request._asdict()}
                connection.execute(schema.requests.insert(), row)

        self.database.write(work)

    def add_observation(self, run_id: str, turn: int, observation: Observation) -> None:
        """Add what the last call of a logged turn came to: the answer of a sub-agent. Raises LogError for an
        ended run, and where no call waits."""
        calls = schema.tool_calls
        waits = (calls.c.run_id == run_id) & (calls.c.turn == turn) & calls.c.ok.is_(None)
        update = calls.update().where(waits).values(**schema.observation_columns(observation))

        def work(connection: sa.Connection) -> None:
            schema.refuse_ended(connection, run_id)
            if connection.execute(update).rowcount != 1:
                raise LogError(f"no call of turn {turn} of run {run_id} waits for an observation")

        self.database.write(work)

    def finish(
        self,
        run_id: str,
        *,
        stop: StopReason,
        stop_detail: str | None = None,
        answer: str | None = None,
        diff: str = "",
        ended: float,
        snapshot: str | None = None,
    ) -> None:
        """End a run; `snapshot` is the workspace that its last turn left, where that turn was logged without.

        Raises LogError for an unknown run, and for one that has ended already.
        """
        end = {"stop": stop, "stop_detail": stop_detail, "answer": answer, "diff": diff, "ended": ended}
        turns = schema.turns
        last = sa.select(sa.func.max(turns.c.turn)).where(turns.c.run_id == run_id).scalar_subquery()
        without = (turns.c.run_id == run_id) & (turns.c.turn == last) & turns.c.snapshot.is_(None)

        def work(connection: sa.Connection) -> None:
            schema.refuse_ended(connection, run_id)
            if snapshot is not None:
                connection.execute(turns.update().where(without).values(snapshot=snapshot))
            connection.execute(schema.runs.update().where(schema.runs.c.id == run_id).values(**end))

        self.database.write(work)

    def finish_served(self, run: Trajectory) -> None:
        """End an open run of a server's client, with its last answer. Raises LogError if it has ended."""
        last = run.turns[-1] if run.turns else None
        answer, ended = (last.completion.text, last.ended) if last else (None, run.started)
        self.finish(run.id, stop=StopReason.FINISHED, answer=answer, ended=ended)

    def reopen(self, run_id: str) -> None:
        """Clear the end of a run so that it can be resumed. Does nothing to one that has not ended.

        Raises LogError for an unknown run, and for one that the policy ended, since that is a result.
        """
        cleared = dict.fromkeys(("stop", "stop_detail", "answer", "ended"))

        def work(connection: sa.Connection) -> None:
            stop, _ = schema.state_of(connection, run_id)
            if stop is not None and not stop.ours:
                raise LogError(
                    f"run {run_id} ended with {stop.value!r}, which is a result; only a run that was killed, "
                    "interrupted or failed by no fault of the policy can be resumed. Fork it instead"
                )
            this = schema.runs.update().where(schema.runs.c.id == run_id)
            connection.execute(this.values(**cleared, diff=""))

        self.database.write(work)

    def append(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory in one transaction."""
        verdicts = (trajectory.verdict,) if trajectory.verdict is not None else ()
        self.database.write(
            lambda connection: _add(
                connection, LoggedRun(trajectory=self._signed(trajectory), verdicts=verdicts)
            )
        )

    def merge(self, runs: Callable[[], Iterable[LoggedRun]]) -> Merged:
        """Add runs in one transaction, all or none; `runs` is called again if the log was locked.

        A run that exists already gains missing verdicts and feedback. Raises LogError if the log holds
        another run with that id, and whatever `runs` raises.
        """

        def work(connection: sa.Connection) -> Merged:
            merged = Merged()
            for run in runs():
                # the directory on another machine is dropped: `apply` must not write where a file says
                bare = run.trajectory.model_copy(update={"verdict": None, "directory": None})
                _merge(connection, run.model_copy(update={"trajectory": self._signed(bare)}), merged)
            return merged

        return self.database.write(work)

    def add_verdict(self, run_id: str, verdict: Verdict) -> None:
        """Add a verdict; the newest one is the trajectory's."""
        self.database.write(lambda connection: schema.insert_verdict(connection, run_id, verdict))

    def add_feedback(self, run_id: str, *feedback: Feedback) -> list[Said]:
        """Add feedback on a run, all rows or none. Raises LogError for an unknown run."""

        def work(connection: sa.Connection) -> list[int]:
            return [schema.insert_feedback(connection, run_id, row) for row in feedback]

        ids = self.database.write(work)
        return [Said(id=i, run=run_id, feedback=row) for i, row in zip(ids, feedback, strict=True)]

    def notes(self, project: str | None, scrub: Scrub) -> Notes:
        """What agents remember of a project (None: of all)."""
        return Notes(self.database, project, scrub)

    def put_blob(self, data: bytes) -> str:
        return self.blobs.put(data)

    def get_blob(self, blob: str) -> bytes:
        return self.blobs.get(blob)

    def claim(self, run_id: str) -> AbstractContextManager[None]:
        """Hold a run while executing it: `with store.claim(run_id): ...`.

        It is released when the process dies. Effective among processes that share an SQLite file's folder,
        and among all machines for a server. Raises LogError, on entry, if another process executes the run.
        """
        return self.database.claim(run_id)

    # ------------------------------------------------------------------------------------ reading

    def resolve(self, run: str) -> str:
        """The id of a run given by id, by unique prefix, or as "last": the newest of the user's own in the
        user's directory (the newest of all without a user). Raises LogError."""
        return self.database.read(partial(self._resolve, run))

    def _resolve(self, run: str, connection: sa.Connection) -> str:
        runs = schema.runs.c
        if run == "last":
            found = self._last(connection)
            passed = sa.exists().where(schema.verdicts.c.run_id == runs.id, schema.verdicts.c.reward >= 1)
            shortest = sa.func.length(runs.diff), runs.started
            winner = sa.select(runs.id).where(runs.id.in_(_side_by_side(found)), passed).order_by(*shortest)
            return str(connection.scalar(winner.limit(1)) or found)
        shown = sa.select(runs.id).where(self.user.sees(runs) if self.user else sa.true())
        if run and connection.scalar(shown.where(runs.id == run)) is not None:
            return run
        begins = shown.where(runs.id.startswith(run, autoescape=True)).order_by(runs.id)
        ids = connection.scalars(begins.limit(_AMBIGUOUS_SHOWN + 1)).all() if run else []
        if len(ids) == 1:
            return str(ids[0])
        if ids:
            some = ", ".join(ids[:_AMBIGUOUS_SHOWN]) + (", ..." if len(ids) > _AMBIGUOUS_SHOWN else "")
            raise LogError(f"run {run!r} is ambiguous: it begins {some}; give more of the id")
        raise LogError(f"no run {run!r} in log {self.url}; {HINT}")

    def _last(self, connection: sa.Connection) -> str:
        """Id of the user's newest run in the user's directory. Raises LogError, which names the one there
        is."""
        runs, user = schema.runs.c, self.user
        newest = sa.select(runs.id, runs.owner, runs.directory).order_by(runs.started.desc(), runs.id.desc())
        newest = newest.limit(1)
        own = newest if user is None else newest.where(user.made(runs))
        here = own if user is None else own.where(runs.directory == user.directory)
        if (found := connection.execute(here).first()) is not None:
            return str(found.id)
        other = newest if user is None else newest.where(user.sees(runs))
        found = connection.execute(own).first() or connection.execute(other).first()
        if user is None or found is None:
            raise LogError(f"log {self.url} holds no runs yet")
        whose = "your newest" if user.owns(found.owner) else f"the newest, of {found.owner},"
        where = f"in {found.directory}" if found.directory else "of no directory"
        raise LogError(
            f"there is no run of yours in {user.directory}; {whose} is {found.id} {where}: name it by its id"
        )

    def get(self, run: str) -> Trajectory:
        """A run by id, by unique prefix, or as "last", equal to what was appended. Raises LogError."""
        return self.database.read(lambda connection: schema.load(connection, self._resolve(run, connection)))

    def earlier_tool(self, tool: ToolSpec) -> tuple[ToolSpec, float] | None:
        """The newest tool of that name that runs were given, and since when, unix seconds; None if they were
        given this very one, or none."""
        table = schema.given_tools
        found = self._all(
            sa.select(table).where(table.c.name == tool.name).order_by(table.c.first_seen.desc())
        )
        if not found or schema.tool_hash(tool) in {row.hash for row in found}:
            return None
        return ToolSpec.model_validate(found[0].spec), found[0].first_seen

    def withholds(self, run: Trajectory) -> bool:
        """Whether the run is of an owner who does not let the user learn from it."""
        return self.user is not None and not self.user.may_learn(run.owner, run.share)

    def task(self, run_id: str) -> Task:
        """The task of a run, without loading the run. `run_id` is a whole id. Raises LogError for an unknown
        run, and for a damaged task."""
        found = self._all(sa.select(schema.tasks.c.body).join(schema.runs).where(schema.runs.c.id == run_id))
        if not found:
            raise LogError(f"no run {run_id!r} in the log; {HINT}")
        try:
            return Task.model_validate(found[0].body)
        except ValueError as damage:
            raise LogError(f"the task of run {run_id} is damaged in the log ({damage})") from damage

    def trajectories(self, *, policy: str | None = None) -> Iterator[Trajectory]:
        """The runs, oldest first, one in memory at a time; `policy` is a policy as the user named it, or the
        id of weights that sampled a turn."""
        for run_id, _ in self.ids(RunFilter(policy=policy)):  # not those that are logged meanwhile
            yield self.database.read(partial(schema.load, run_id=run_id))

    def ids(self, chosen: RunFilter | None = None, *, by_task: bool = False) -> list[tuple[str, str]]:
        """Id and task key of the selected runs: oldest first, or task by task."""
        chosen = self._seen(chosen)
        found = self._all(chosen.select(schema.runs.c.id, schema.tasks.c.key, by_task=by_task))
        return [(run, key) for run, key in found if chosen.takes(key)]

    def _seen(self, chosen: RunFilter | None) -> RunFilter:
        return replace(chosen or RunFilter(), user=self.user)

    def side_by_side(self, run_id: str) -> list[str]:
        """Ids of the runs of a task in a directory that were under way together, this one among them: its
        tries, oldest first; behind them the runs of another policy that followed one of them, with it as
        their parent. Empty for a run of no directory that no other followed."""
        found = self._all(_followed(schema.runs.c.id == run_id, schema.runs.c.parent))
        root = str(found[0][0]) if found else run_id
        tries = [str(row[0]) for row in self._all(_side_by_side(root))]
        of_tries = schema.runs.c.parent.in_(tries or [root])
        more = [str(row[0]) for row in self._all(_followed(of_tries, schema.runs.c.id))]
        return [*(tries or [root] * bool(more)), *more]

    def facts(self, chosen: RunFilter | None = None) -> Iterator[RunFacts]:
        """The facts that decide whether each run may train, by task key and oldest first, in constant memory.

        Nothing is validated: damaged rows are returned as they are. Close the iterator if it is left early.
        """
        return self.database.stream(lambda connection: stream_facts(connection, self._seen(chosen)))

    def has_tokens(self) -> bool:
        """Whether a turn of any run has token ids; a log of hosted models alone has none."""
        turns = schema.turns.c
        return bool(self._all(sa.select(turns.turn).where(turns.sampled_ids.is_not(None)).limit(1)))

    def runs(self, limit: int | None = None, by: str | None = EVERYBODY) -> list[RunSummary]:
        """The newest runs, newest last: of an owner, of all, or (None) of the user."""
        table = _summaries.c
        query = sa.select(*(table[name] for name in _shown)).order_by(table.started.desc(), table.id.desc())
        if self.user is not None:
            query = query.where(self.user.made(table) if by is None else self.user.sees(table))
        if by not in (None, EVERYBODY):
            query = query.where(table.owner == by)
        found = self._all(query.limit(limit))
        return [RunSummary(**row._mapping) for row in reversed(found)]

    def session_runs(self, session: str, owner: str | None = None) -> list[str]:
        """Ids of the runs that a session's requests made, oldest first; `owner` None: of every owner."""
        runs, requests = schema.runs.c, schema.requests.c
        asked = sa.select(requests.run_id).where(requests.session == session)
        if owner is not None:
            asked = asked.where(requests.owner == owner)
        found = self._all(sa.select(runs.id).where(runs.id.in_(asked)).order_by(runs.started, runs.id))
        return [str(row[0]) for row in found]

    def answers(self, session: str, owner: str, conversations: Sequence[str]) -> list[tuple[str, int, str]]:
        """Run, turn and hash of the answers that left one of these conversations in an owner's session,
        newest first; at most 64."""
        runs, requests = schema.runs.c, schema.requests.c
        query = sa.select(requests.run_id, requests.turn, requests.conversation).join(schema.runs)
        query = query.where(requests.conversation.in_(conversations))
        query = query.where(requests.session == session, requests.owner == owner)
        found = self._all(query.order_by(runs.started.desc(), runs.id.desc()).limit(_MOST_ANSWERS))
        return [tuple(row) for row in found]

    def left_open(self, task_prefix: str, before: float) -> list[str]:
        """Ids of the runs of tasks with that prefix that never ended, and did nothing after `before`."""
        runs, tasks, turns = schema.runs.c, schema.tasks.c, schema.turns.c
        last = sa.select(sa.func.max(turns.ended)).where(turns.run_id == runs.id).scalar_subquery()
        query = sa.select(runs.id).join(schema.tasks).where(runs.stop.is_(None))
        query = query.where(tasks.key.startswith(task_prefix, autoescape=True))
        return [str(row[0]) for row in self._all(query.where(sa.func.coalesce(last, runs.started) < before))]

    def is_open(self, run_id: str) -> bool:
        """Whether a run of that whole id has begun and not ended, and is no conversation of a client."""
        runs = schema.runs.c
        served = runs.tools_hash.startswith(CLIENT_TOOLS, autoescape=True)
        return bool(self._all(sa.select(runs.id).where(runs.id == run_id, runs.stop.is_(None), ~served)))

    def conversations(self, run_id: str) -> list[str]:
        """The hash that each turn of a client's run left, those of its parents included."""
        runs, requests = schema.runs.c, schema.requests.c
        found = self._all(sa.select(runs.parent, runs.parent_step).where(runs.id == run_id))
        parent, step = found[0] if found else (None, None)
        own = self._all(
            sa.select(requests.conversation).where(requests.run_id == run_id).order_by(requests.turn)
        )
        before = self.conversations(str(parent))[: step or 0] if parent else ()
        return [*before, *(str(row[0]) for row in own)]

    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """The result of a function that reads over a connection, in one transaction."""
        return self.database.read(query)

    def _all(self, query: sa.Select[Any]) -> Sequence[Any]:
        return self.database.read(lambda connection: connection.execute(query).all())

    def verdicts(self, run_id: str) -> tuple[Verdict, ...]:
        """Every verdict of a run, newest last."""
        return self.database.read(partial(schema.verdicts_of, run_id=run_id))

    def check_blobs(self, run_id: str, checked: set[str]) -> str | None:
        """What is wrong with the first corrupt blob of a run: of its workspaces, their files, its outputs;
        None if none is. Absent blobs, as of a log that was copied without them, are not looked at, nor those
        in `checked`, to which the others are added."""

        runs, turns, calls = schema.runs.c, schema.turns.c, schema.tool_calls.c
        columns = (runs.snapshot, runs.id), (turns.snapshot, turns.run_id), (calls.blob, calls.run_id)
        start, after, outputs = (
            {row[0] for row in self._all(sa.select(column).where(key == run_id)) if row[0]}
            for column, key in columns
        )
        trees = start | after
        try:
            outputs |= self._shown(run_id)
            for tree in trees - checked:
                if tree in self.blobs:
                    outputs |= set(blobs_of(tree, self.blobs))
            for blob in outputs - checked:
                if blob in self.blobs:
                    self.blobs.get(blob)
        except NanoError as damage:
            return str(damage)
        checked |= trees | outputs
        return None

    def _shown(self, run_id: str) -> set[str]:
        """The blobs of the images that a run shows. Raises LogError for a damaged task."""
        turns, calls = schema.turns.c, schema.tool_calls.c
        rows = self._all(sa.select(turns.messages).where(turns.run_id == run_id, schema.messages_show))
        seen = self._all(sa.select(calls.images).where(calls.run_id == run_id, calls.images.is_not(None)))
        lists = [*(row[0] for row in seen), *(m.get("images", ()) for row in rows for m in row[0])]
        return {image["blob"] for shown in lists for image in shown} | {
            image.blob for image in self.task(run_id).images
        }

    def feedback(self, run_id: str) -> tuple[Feedback, ...]:
        return self.database.read(partial(schema.feedback_of, run_id=run_id))

    def logged(self, run_id: str) -> LoggedRun:
        """A run with every verdict and all feedback, on one view of the log. `run_id` is a whole id."""
        return self.database.read(partial(_load, run_id=run_id))

    def all_feedback(self, *, run: str | None = None, page: int = 1000) -> Iterator[Said]:
        """The feedback of a run, or of all, in order of arrival, `page` rows in memory at a time."""
        table, last = schema.feedback, 0
        while True:
            query = sa.select(table).where(table.c.id > last).order_by(table.c.id).limit(page)
            if run is not None:
                query = query.where(table.c.run_id == run)
            found = [row._mapping for row in self._all(query)]
            yield from map(schema.said_from, found)
            if len(found) < page:
                return
            last = found[-1]["id"]

    def sql(self, query: str) -> SqlResult:
        """Rows of one SELECT over the views (views.py). Raises LogError for a query that fails or writes."""
        try:
            return SqlResult(*self.database.query(query))
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise LogError(f"log {self.url}: {error}; the query was: {query}") from error
        except DBAPIError as error:
            raise LogError(f"log {self.url}: {error.orig}; the query was: {query}") from error


def _side_by_side(run_id: str) -> sa.Select[Any]:
    runs, this = schema.runs.alias().c, schema.runs.alias().c
    return (
        sa.select(runs.id)
        .where(this.id == run_id, runs.task_id == this.task_id, runs.directory == this.directory)
        .where(runs.parent.is_(None), this.parent.is_(None), runs.owner.is_not_distinct_from(this.owner))
        .where(runs.started <= sa.func.coalesce(this.ended, runs.started))
        .where(this.started <= sa.func.coalesce(runs.ended, this.started))
        .order_by(runs.started, runs.id)
    )


def _followed(which: sa.ColumnElement[bool], column: sa.Column[Any]) -> sa.Select[Any]:
    """A column of those of the runs whose parent another policy executed, oldest first."""
    runs, parent = schema.runs.c, schema.runs.alias().c
    query = sa.select(column).where(which, parent.id == runs.parent, parent.policy != runs.policy)
    return query.order_by(runs.started, runs.id)


def _load(connection: sa.Connection, run_id: str) -> LoggedRun:
    return LoggedRun(
        trajectory=schema.load(connection, run_id),
        verdicts=schema.verdicts_of(connection, run_id),
        feedback=schema.feedback_of(connection, run_id),
    )


def _add(connection: sa.Connection, run: LoggedRun) -> None:
    schema.insert_run(connection, run.trajectory)
    schema.insert_turns(connection, run.trajectory.id, run.trajectory.turns)
    _extend(connection, run)


def _extend(connection: sa.Connection, run: LoggedRun) -> None:
    for verdict in run.verdicts:
        schema.insert_verdict(connection, run.trajectory.id, verdict)
    for said in run.feedback:
        schema.insert_feedback(connection, run.trajectory.id, said)


def _merge(connection: sa.Connection, run: LoggedRun, merged: Merged) -> None:
    """Add a run, or add the missing verdicts and feedback to an existing one.

    Raises LogError if the log holds another run with that id.
    """
    if not schema.is_there(connection, run.trajectory.id):
        _add(connection, run)
        merged.added += 1
        return
    there = _load(connection, run.trajectory.id)
    # whose it is does not matter here: a file of an older version says nothing of it
    apart = dict.fromkeys(("verdict", "directory", "owner", "project", "share"))
    if there.trajectory.model_copy(update=apart) != run.trajectory.model_copy(update=apart):
        raise LogError(
            f"run {run.trajectory.id} is in the log with another content; import into another log with --log"
        )
    lacking = {
        "verdicts": tuple(v for v in run.verdicts if v not in there.verdicts),
        "feedback": tuple(f for f in run.feedback if f not in there.feedback),
    }
    _extend(connection, run.model_copy(update=lacking))
    if any(lacking.values()):
        merged.extended += 1
    else:
        merged.known += 1
