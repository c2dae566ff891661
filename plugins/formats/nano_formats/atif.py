"""ATIF v1.8, the trajectory format of Harbor: written with the token triple, read from v1.0 on.

What it has no field for (sampling, mask, exit codes, verdicts, the task) is in `extra.nano`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from nano_coder.agent.profiles import plain_opening
from nano_coder.run_formats import SAID_BY_USER, RunFormat, call_id, row_reader
from nano_formats.row_format import OpenModel
from nano_formats.token_triple import Triple, refuse_edited, remainder, restored, triple_of, triples
from nano_formats.transcript import Transcript, iso, unix
from nano_shared.errors import Refused
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import Row, at_field, validated
from nano_shared.types import Message, Role, StopReason, Turn

VERSION = "ATIF-v1.8"
_READABLE = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_TRIPLE = ("prompt_token_ids", "completion_token_ids", "logprobs")


# ------------------------------------------------------------------------------------------ writing


def write(
    run: LoggedRun, opening: Sequence[Message] | None = None, *, tools: list[dict[str, Any]] | None = None
) -> Row:
    """One trajectory as a JSON object that Harbor's models accept."""
    trajectory = run.trajectory
    steps: list[Row] = [
        {"step_id": number, "source": _SOURCES[m.role], "message": m.content}
        for number, m in enumerate(opening or plain_opening(trajectory.task), start=1)
    ]
    found = list(triples(trajectory))
    for turn, triple in zip(trajectory.turns, found, strict=True):
        steps.append(_agent_step(len(steps) + 1, turn, triple))
        steps += _user_steps(len(steps) + 1, turn)
    made_by = {"version": trajectory.runtime_version, "model_name": trajectory.policy}
    agent = {"name": "nano-coder", **made_by, **({"tool_definitions": tools} if tools else {})}
    return {
        "schema_version": VERSION, "session_id": trajectory.id, "trajectory_id": trajectory.id,
        "agent": agent, "steps": steps, "final_metrics": {**_totals(found), "total_steps": len(steps)},
        "extra": {"reward": trajectory.reward, "stop": trajectory.stop, "nano": remainder(run)},
    }  # fmt: skip


_SOURCES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "user", Role.TOOL: "user"}


def _agent_step(number: int, turn: Turn, triple: Triple | None) -> Row:
    step: Row = {
        "step_id": number, "timestamp": iso(turn.started), "source": "agent",
        "model_name": turn.completion.policy_id, "llm_call_count": 1,
        "message": turn.thought if turn.calls else turn.completion.text,
    }  # fmt: skip
    if turn.calls:
        step["tool_calls"] = [
            {"tool_call_id": call_id(turn.index, n), "function_name": call.name, "arguments": call.arguments}
            for n, call in enumerate(turn.calls)
        ]
    results = [
        {"content": seen.text, "extra": {"ok": seen.ok, "exit_code": seen.exit_code}}
        | ({"source_call_id": call_id(turn.index, position)} if position < len(turn.calls) else {})
        for position, seen in enumerate(turn.observations)
        if seen.tool != SAID_BY_USER
    ]
    if results:
        step["observation"] = {"results": results}
    if triple is not None:
        values = map(list, (triple.prompt_ids, triple.sampled_ids, triple.logprobs))
        sizes = {"prompt_tokens": len(triple.prompt_ids), "completion_tokens": len(triple.sampled_ids)}
        step["metrics"] = sizes | dict(zip(_TRIPLE, values, strict=True))
    return step


def _user_steps(first: int, turn: Turn) -> list[Row]:
    said = [seen.text for seen in turn.observations if seen.tool == SAID_BY_USER]
    return [{"step_id": n, "source": "user", "message": text} for n, text in enumerate(said, start=first)]


def _totals(found: Sequence[Triple | None]) -> Row:
    known = [triple for triple in found if triple is not None]
    if not known or len(known) < len(found):
        return {}
    return {
        "total_prompt_tokens": sum(len(t.prompt_ids) for t in known),
        "total_completion_tokens": sum(len(t.sampled_ids) for t in known),
    }


# ------------------------------------------------------------------------------------------ reading


class Part(OpenModel):
    type: str
    text: str | None = None


Content = str | list[Part] | None


class Call(OpenModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(OpenModel):
    source_call_id: str | None = None
    content: Content = None
    extra: dict[str, Any] | None = None


class Results(OpenModel):
    results: list[Result]


class AtifStep(OpenModel):
    step_id: int = Field(ge=1)
    source: str = Field(pattern="^(system|user|agent)$")
    timestamp: str | None = None
    message: Content = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    observation: Results | None = None
    metrics: dict[str, Any] | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class Agent(OpenModel):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class Document(OpenModel):
    schema_version: str
    session_id: str | None = None
    agent: Agent
    steps: list[AtifStep] = Field(min_length=1)
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[dict[str, Any]] | None = None


def read(row: Row) -> Iterator[LoggedRun]:
    """The run of a document, and after it those of its subagents. Raises Refused with the field."""
    version = row.get("schema_version")
    if version not in _READABLE:
        known = f"{_READABLE[0]} to {VERSION}"
        raise Refused("schema_version", f"{version!r:.40} is none that this program reads ({known})")
    document = validated(Document, row)
    for number, step in enumerate(document.steps):
        if step.step_id != number + 1:
            raise Refused(f"steps.{number}.step_id", f"must be {number + 1}, not {step.step_id}")
    if document.extra and "nano" in document.extra:
        yield _ours(row, document)
        return
    run = _foreign(row, document)
    yield run
    for number, inner in enumerate(document.subagent_trajectories or ()):
        with at_field(f"subagent_trajectories.{number}"):
            for sub in read(inner):
                fork = sub.trajectory.model_copy(update={"parent": run.trajectory.id})
                yield sub.model_copy(update={"trajectory": fork})


def _ours(row: Row, document: Document) -> LoggedRun:
    agent_steps = [step for step in document.steps if step.source == "agent"]
    found = (_triple(step) for step in agent_steps)
    assert document.extra is not None
    run = restored(document.extra["nano"], found, "extra.nano")
    opening = []
    for given in document.steps:
        if given.source == "agent":
            break
        role = Role.SYSTEM if given.source == "system" else Role.USER
        opening.append(Message(role=role, content=_text(given.message)))
    refuse_edited(row, lambda: write(run, opening, tools=document.agent.tool_definitions), "extra.nano")
    return run


def _foreign(row: Row, document: Document) -> LoggedRun:
    agent = document.agent
    transcript = Transcript(
        format="atif", agent=f"{agent.name} {agent.version}", model=agent.model_name or "unknown",
        tools=agent.tool_definitions,
    )  # fmt: skip
    for number, step in enumerate(document.steps):
        with at_field(f"steps.{number}"):
            _take(transcript, step)
    last = transcript.steps[-1] if transcript.steps else None
    ended = last is not None and not (last.calls and not last.answers)
    return transcript.run(row, stop=StopReason.FINISHED if ended else StopReason.INTERRUPTED)


def _take(transcript: Transcript, step: AtifStep) -> None:
    transcript.now = unix(step.timestamp, transcript.now, "timestamp")
    text = _text(step.message)
    seen = step.observation.results if step.observation else []
    if step.source != "agent" or step.is_copied_context or step.llm_call_count == 0:
        # what the harness wrote, and what an earlier part of the conversation said, the model only read
        role = Role.SYSTEM if step.source == "system" else Role.USER
        for said in (text, *(_text(result.content) for result in seen)):
            if said:
                transcript.tell(role, said)
        return
    taken = transcript.step(model=step.model_name, fresh=True)
    taken.said += [text] if text else []
    taken.reasoned += [step.reasoning_content] if step.reasoning_content else []
    taken.triple = _triple(step)
    for call in step.tool_calls or ():
        transcript.call(taken, call.tool_call_id, call.function_name, call.arguments)
    for result in seen:
        extra = result.extra or {}
        if result.source_call_id is None:
            transcript.tell(Role.USER, _text(result.content))
        elif result.source_call_id not in taken.calls:
            raise Refused("observation.results", f"{result.source_call_id!r} answers no call of its step")
        else:
            failed = extra.get("ok") is False or extra.get("tool_result_is_error") is True
            transcript.answer(result.source_call_id, _text(result.content), ok=not failed)


def _triple(step: AtifStep) -> Triple | None:
    return triple_of(step.metrics or {}, _TRIPLE, "metrics.")


def _text(content: Content) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part.text if part.text is not None else f"[{part.type} left out]" for part in content)


ATIF = RunFormat(
    name="atif", read=row_reader(read),
    write_run=lambda run, opening, tools: write(run, opening, tools=tools), alone=True,
)  # fmt: skip
