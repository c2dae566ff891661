"""Converts values to rows of the log and back, exactly: `trajectory_from(rows of x) == x`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import RowMapping

from nano_shared.feedback import Feedback, Said
from nano_shared.hashing import content_hash
from nano_shared.types import (
    ApiAnswer,
    Completion,
    Denials,
    Observation,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

Columns = dict[str, Any]

_RUN_FIELDS = (
    "id", "policy", "profile", "profile_hash", "template_hash", "tools_hash", "runtime_version", "parent",
    "parent_step", "seed", "snapshot", "started", "ended", "stop", "stop_detail", "answer", "diff",
    "directory",
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
    return Observation(denials=denials, **{name: row[name] for name in _OBSERVATION_FIELDS})
