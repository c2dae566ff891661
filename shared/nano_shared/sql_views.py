"""The documented SQL views of the log, with a sentence for each column.

Views are not part of migrations: they are dropped before one and created again after. A changed view
therefore needs a new (perhaps empty) migration to reach existing logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

_NEWEST = "(SELECT max(n.id) FROM log_verdicts n WHERE n.run_id = r.id)"
_LAST_TURN = "(SELECT max(n.turn) FROM log_turns n WHERE n.run_id = r.id)"
_TURNS = "FROM log_turns t WHERE t.run_id = r.id"


@dataclass(frozen=True, slots=True)
class SqlView:
    """A view: `columns` maps a name to its SQL expression and its meaning; times are unix seconds."""

    name: str
    about: str
    columns: dict[str, tuple[str, str]]
    source: str

    @property
    def sql(self) -> str:
        selected = ", ".join(f"{expression} AS {name}" for name, (expression, _) in self.columns.items())
        return f"CREATE VIEW {self.name} AS SELECT {selected} FROM {self.source}"


RUNS = SqlView(
    "runs",
    "One row for each execution.",
    {
        "id": ("r.id", "run id; sorts by time"),
        "task_key": ("k.key", "durable name of the task"),
        "task_id": ("r.task_id", "content hash of the task"),
        "prompt": ("k.prompt", "what was asked"),
        "split": ("k.split", "train, test or NULL"),
        "level": ("k.level", "difficulty, from 0"),
        "family": ("k.family", "program family; splits never share one"),
        "policy": ("r.policy", "the policy as the user named it"),
        "policy_id": (
            f"(SELECT t.policy_id {_TURNS} AND t.turn = {_LAST_TURN})",
            "weights that sampled the last turn; NULL before the first",
        ),
        "stop": ("r.stop", "why it ended; NULL while it runs or after it was killed"),
        "stop_detail": ("r.stop_detail", "the stop reason in words"),
        "reward": ("v.reward", "of the newest verdict; NULL where there is none, or where it does not count"),
        "trust": ("v.trust", "of the newest verdict: hidden, user_check, judge or none"),
        "grader": ("v.grader", "of the newest verdict: name and version"),
        "failure_kind": ("v.failure_kind", "of the newest verdict"),
        "turns": (f"(SELECT count(*) {_TURNS})", "finished turns"),
        "context_tokens": (f"(SELECT coalesce(sum(t.context_tokens), 0) {_TURNS})", "tokens read, mask 0"),
        "sampled_tokens": (
            f"(SELECT coalesce(sum(t.sampled_tokens), 0) {_TURNS} AND t.turn >= coalesce(r.parent_step, 0))",
            "tokens sampled, mask 1; a fork's own",
        ),
        "trainable": (
            f"CASE WHEN EXISTS (SELECT 1 {_TURNS}) "
            f"AND NOT EXISTS (SELECT 1 {_TURNS} AND t.token_row IS NULL) THEN 1 ELSE 0 END",
            "1 where each turn holds its token ids and log-probs; 0 marks a text-only run",
        ),
        "answer": ("r.answer", "given to submit"),
        "diff": ("r.diff", "unified diff of the workspace"),
        "started": ("r.started", "unix seconds"),
        "ended": ("r.ended", "unix seconds; NULL while it runs"),
        "seconds": ("r.ended - r.started", "wall clock"),
        "parent": ("r.parent", "run this one was forked from"),
        "parent_step": ("r.parent_step", "turns taken over from the parent; they are the first of the run"),
        "seed": ("r.seed", "of the run"),
        "snapshot": ("r.snapshot", "workspace before the first action, a blob id"),
        "directory": (
            "r.directory",
            "what the workspace is a copy of; NULL for a task with its own files",
        ),
        "profile": ("r.profile", "interface profile"),
        "profile_hash": ("r.profile_hash", "its content hash"),
        "template_hash": ("r.template_hash", "of the chat template"),
        "tools_hash": ("r.tools_hash", "of the tools' schemas"),
        "runtime_version": ("r.runtime_version", "of nano"),
    },
    f"log_runs r JOIN log_tasks k ON k.id = r.task_id LEFT JOIN log_verdicts v ON v.id = {_NEWEST}",
)

TURNS = SqlView(
    "turns",
    "One row for each call of the policy and what followed.",
    {
        "run_id": ("t.run_id", "run"),
        "turn": ("t.turn", "from 0"),
        "policy_id": ("t.policy_id", "weights that sampled"),
        "policy_version": ("t.policy_version", "optimizer steps behind the weights"),
        "text": ("t.text", "raw completion as sampled"),
        "thought": ("t.thought", "text beside the calls"),
        "finish": ("t.finish", "stop or length"),
        "parse_error": ("t.parse_error", "what was wrong where no call could be read"),
        "parser": ("t.parser", "dialect that read the completion"),
        "repairs": ("t.repairs", "liberties the parser and the tools took, a JSON list"),
        "tool_calls": (
            "(SELECT count(*) FROM log_tool_calls c WHERE c.run_id = t.run_id AND c.turn = t.turn)",
            "calls and observations of the turn",
        ),
        "context_tokens": ("t.context_tokens", "tokens appended before sampling; NULL on a text-only turn"),
        "sampled_tokens": ("t.sampled_tokens", "tokens sampled; NULL on a text-only turn"),
        "token_row": ("t.token_row", "grows where history was rewritten"),
        "context_ids": ("t.context_ids", "blob of little-endian uint32"),
        "sampled_ids": ("t.sampled_ids", "blob of little-endian uint32"),
        "logprobs": ("t.logprobs", "blob of little-endian float64, one for each sampled id"),
        "sampling": ("t.sampling", "sampling parameters, JSON"),
        "snapshot": ("t.snapshot", "workspace after the turn, a blob id"),
        "started": ("t.started", "unix seconds"),
        "ended": ("t.ended", "unix seconds"),
        "seconds": ("t.ended - t.started", "wall clock"),
        "delegated_by": ("t.delegated_by", "of a sub-agent: the turn that delegated to it; else NULL"),
        "api": ("t.api", "calls, reasoning, usage and cost as an API returned them, JSON; else NULL"),
    },
    "log_turns t",
)

REQUESTS = SqlView(
    "requests",
    "One row for each request of a client of `nano-coder serve`.",
    {
        "run_id": ("q.run_id", "run"),
        "turn": ("q.turn", "the turn that answers it, from 0"),
        "session": ("q.session", "name of its session; empty where it named none"),
        "client": ("q.client", "user agent"),
        "conversation": ("q.conversation", "hash of all messages up to the answer"),
        "owner": ("q.owner", "hash of the client's key, to whom the session belongs; empty without one"),
    },
    "log_requests q",
)

TOOL_CALLS = SqlView(
    "tool_calls",
    "One row for each action and what really happened.",
    {
        "run_id": ("c.run_id", "run"),
        "turn": ("c.turn", "turn, from 0"),
        "position": ("c.position", "within the turn, from 0"),
        "tool": ("coalesce(c.call_name, c.tool)", "tool that was called"),
        "arguments": ("c.arguments", "JSON object; NULL where an observation answers no call"),
        "ok": ("c.ok", "whether it succeeded; NULL where the call was never executed"),
        "observation": ("c.text", "exactly as shown to the model"),
        "exit_code": ("c.exit_code", "NULL where no program ran, or a signal ended it"),
        "signal": ("c.signal", "that ended it"),
        "timed_out": ("c.timed_out", "whether it ran past its limit"),
        "bytes_total": ("c.bytes_total", "size of the full output"),
        "truncated": ("c.truncated", "whether the model saw less than that"),
        "blob": ("c.blob", "the full output where it was truncated"),
        "files_changed": ("c.files_changed", "JSON list of paths"),
        "denied_network": ("c.denied_network", "network accesses the sandbox refused"),
        "denied_secrets": ("c.denied_secrets", "reads of secrets it refused"),
        "denied_writes_outside": ("c.denied_writes_outside", "writes outside the workspace it refused"),
        "started": ("c.started", "unix seconds"),
        "ended": ("c.ended", "unix seconds"),
        "seconds": ("c.ended - c.started", "wall clock"),
    },
    "log_tool_calls c",
)

VERDICTS = SqlView(
    "verdicts",
    "One row for each judgement; several graders and versions stand side by side.",
    {
        "id": ("v.id", "the largest of a run is its newest"),
        "run_id": ("v.run_id", "run"),
        "reward": ("v.reward", "NULL: a failure that the policy could not cause"),
        "components": ("v.components", "JSON object of name and score"),
        "turn_rewards": ("v.turn_rewards", "JSON list, one for each turn, or NULL"),
        "checks": ("v.checks", "JSON object of name and pass, fail, error or timeout"),
        "tampering": ("v.tampering", "JSON list of findings"),
        "failure_kind": ("v.failure_kind", "what went wrong, by name"),
        "trust": ("v.trust", "hidden, user_check, judge or none"),
        "grader": ("v.grader", "name and version"),
        "graded_hash": ("v.graded_hash", "content hash of what was graded"),
        "check_run": ("v.check_run", "JSON of a check by command: exit code, end of its output; or NULL"),
        "created": ("v.created", "unix seconds"),
    },
    "log_verdicts v",
)

FEEDBACK = SqlView(
    "feedback",
    "One row for each thing said about a run, a turn or a span.",
    {
        "id": ("f.id", "in order of arrival"),
        "run_id": ("f.run_id", "run"),
        "turn": ("f.turn", "NULL speaks of the whole run"),
        "span_start": ("f.span_start", "first character within the turn's text"),
        "span_end": ("f.span_end", "one past the last"),
        "kind": ("f.kind", "accept, reject, edit, thumb, note or outcome"),
        "value": ("f.value", "+1 or -1 for thumbs, or a score"),
        "text": ("f.text", "note, edited text, or outcome in words"),
        "author": ("f.author", "who said it"),
        "created": ("f.created", "unix seconds"),
    },
    "log_feedback f",
)

VIEWS = (RUNS, TURNS, REQUESTS, TOOL_CALLS, VERDICTS, FEEDBACK)


def drop_views(connection: Connection) -> None:
    for view in VIEWS:
        _run(connection, f"DROP VIEW IF EXISTS {view.name}")


def create_views(connection: Connection) -> None:
    for view in VIEWS:
        _run(connection, view.sql)


def _run(connection: Connection, sql: str) -> Any:
    return connection.exec_driver_sql(sql)
