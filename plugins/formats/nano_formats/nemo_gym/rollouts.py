"""NeMo Gym rollouts, one a line: a Responses API request and response, the token triple, the reward.

What the format has no field for is in `nano_run`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from nano_coder.agent.profiles import plain_opening
from nano_coder.run_formats import SAID_BY_USER, RunFormat, call_id, row_reader
from nano_formats.responses_items import TRIPLE, take_item
from nano_formats.token_triple import Triple, refuse_edited, remainder, restored, triple_of, triples
from nano_formats.transcript import Transcript
from nano_shared.errors import Refused
from nano_shared.files import content_hash
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import Row, at_field, refusing_invalid
from nano_shared.types import Message, Role, Sampling, StopReason, Trust, Turn, Verdict

_KINDS = """
transport_unreachable transport_peer_drop transport_timeout transport_local_resource agent_run_error
agent_request_failed agent_timeout agent_command_not_allowed judge_failed judge_unparseable verifier_error
provider_unavailable provider_quota_exhausted provider_oom_killed session_lost session_expired
session_release_failed cancelled kill_shaped shutdown persistence_failed cohort_incomplete
"""
FAILURE_KINDS = frozenset(_KINDS.split())
"""NeMo Gym's closed vocabulary; other kinds are named `nano:<kind>`"""
_TAKEN = {"reward", "mask_sample", "failure_kind", "failure_reason", "reward_components", "response"}


def verified(verdict: Verdict) -> dict[str, Any]:
    """The response for a verdict. `reward` must be a number there: an invalid measurement is masked."""
    kind, _, detail = (verdict.failure_kind or "").partition(": ")
    components = {name: value for name, value in verdict.components.items() if value is not None}
    found = "; ".join(f"{t.kind}: {t.detail}" for t in verdict.tampering)
    return {
        **{name: value for name, value in components.items() if name not in _TAKEN},
        "reward": 0.0 if verdict.reward is None else verdict.reward,
        "mask_sample": verdict.reward is None,
        "failure_kind": None if not kind else kind if kind in FAILURE_KINDS else f"nano:{kind}",
        "failure_reason": detail or found or None,
        "reward_components": components,
        "nano_verdict": verdict.model_dump(mode="json"),
    }


REMAINDER = "nano_run"


# ------------------------------------------------------------------------------------------ writing


def write(
    run: LoggedRun, opening: Sequence[Message] | None = None, *, tools: list[dict[str, Any]] | None = None
) -> Row:
    trajectory = run.trajectory
    shown = opening or plain_opening(trajectory.task)
    found = list(triples(trajectory))
    output: list[Row] = []
    for turn, triple in zip(trajectory.turns, found, strict=True):
        output += _items(turn, triple)
    functions = [{"type": "function", "strict": None, **_function(tool)} for tool in tools or ()]
    sampling = trajectory.turns[0].completion.sampling if trajectory.turns else Sampling()
    both = {
        "tools": functions, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "parallel_tool_calls": True,
    }  # fmt: skip
    said = [{"type": "message", "role": _role(m.role), "content": m.content} for m in shown]
    request = {"input": said, "max_output_tokens": sampling.max_tokens, **both}
    response = {
        "id": f"resp_{trajectory.id}", "created_at": int(trajectory.started), "model": trajectory.policy,
        "object": "response", "output": output, "tool_choice": "auto", "status": "completed",
        "usage": _usage([triple for triple in found if triple is not None]), **both,
    }  # fmt: skip
    graded = verified(trajectory.verdict) if trajectory.verdict else _UNGRADED
    return {name: value for name, value in graded.items() if not name.startswith("_ng_")} | {
        "responses_create_params": request, "response": response, "agent_ref": {"name": "nano-coder"},
        REMAINDER: remainder(run),
    }  # fmt: skip


_UNGRADED = {"reward": 0.0, "mask_sample": True, "failure_kind": None, "failure_reason": "never graded"}


def _items(turn: Turn, triple: Triple | None) -> list[Row]:
    text = turn.thought if turn.calls else turn.completion.text
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": f"msg_{turn.index}", "role": "assistant", "status": "completed"}
    items: list[Row] = [message | {"content": [part]}]
    for position, call in enumerate(turn.calls):
        name, arguments = call_id(turn.index, position), json.dumps(call.arguments)
        called = {"name": call.name, "arguments": arguments, "status": "completed"}
        items.append({"type": "function_call", "id": name, "call_id": name, **called})
    if triple is not None:  # on the last item that the call of the model gave
        values = (triple.prompt_ids, triple.sampled_ids, triple.logprobs)
        items[-1] |= {name: list(value) for name, value in zip(TRIPLE, values, strict=True)}
    for position, seen in enumerate(turn.observations):
        if seen.tool != SAID_BY_USER and position < len(turn.calls):
            answered = {"call_id": call_id(turn.index, position), "output": seen.text}
            items.append({"type": "function_call_output", **answered})
        else:
            items.append({"type": "message", "role": "user", "content": seen.text})
    return items


def _role(role: Role) -> str:
    return "user" if role is Role.TOOL else role.value


def _function(tool: dict[str, Any]) -> Row:
    inner = tool.get("function")
    return dict(inner) if isinstance(inner, dict) else dict(tool)


def _usage(found: Sequence[Triple]) -> Row:
    read, written = sum(len(t.prompt_ids) for t in found), sum(len(t.sampled_ids) for t in found)
    return {
        "input_tokens": read, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ reading


def read(row: Row) -> Iterator[LoggedRun]:
    """The run of a rollout row. Raises Refused with the field."""
    request, response = _object(row, "responses_create_params"), _object(row, "response")
    items = list(_flat(response))
    if REMAINDER in row:
        yield _ours(row, request, items)
        return
    now = _number(response.get("created_at", 0), "response.created_at")
    model, tools = str(response.get("model") or "unknown"), _tools(request)
    transcript = Transcript(format="nemo-gym", agent=_agent(row), model=model, now=now, tools=tools)
    shown = request.get("input")
    for field, given in (("responses_create_params.input", _input(shown)), ("response.output", items)):
        for number, item in enumerate(given):
            with at_field(f"{field}.{number}"):
                take_item(transcript, item)
    verdict = _verdict(row, _number(row.get("reward"), "reward"), content_hash(response))
    yield transcript.run(row, stop=StopReason.FINISHED, sampling=_sampling(request), verdict=verdict)


def _ours(row: Row, request: Row, items: list[Row]) -> LoggedRun:
    calls: list[list[Row]] = []
    for item in items:
        if item.get("type") == "message" and item.get("role") == "assistant":
            calls.append([])
        if calls:
            calls[-1].append(item)
    run = restored(row[REMAINDER], (_triple(call) for call in calls), REMAINDER)
    opening = []
    for item in _input(request.get("input")):
        with refusing_invalid("responses_create_params.input"):
            opening.append(Message.model_validate({"role": item.get("role"), "content": item.get("content")}))
    # what their collection adds to a row is no edit of ours
    ours = {key: value for key, value in row.items() if not key.startswith("_ng_")}
    refuse_edited(ours, lambda: write(run, opening, tools=_tools(request)), REMAINDER)
    return run


def _triple(call: list[Row]) -> Triple | None:
    found = [triple_of(item, TRIPLE) for item in call]
    return next((triple for triple in found if triple is not None), None)


def _flat(response: Row) -> Iterator[Row]:
    """Some agents of NeMo Gym write a list of items a step."""
    output = response.get("output")
    if not isinstance(output, list):
        raise Refused("response.output", "must be a list of items")
    for number, step in enumerate(output):
        for item in step if isinstance(step, list) else [step]:
            if not isinstance(item, dict):
                raise Refused(f"response.output.{number}", "must be an object with a type")
            yield item


def _input(shown: Any) -> list[Row]:
    if isinstance(shown, str):
        return [{"type": "message", "role": "user", "content": shown}]
    if not isinstance(shown, list) or not all(isinstance(item, dict) for item in shown):
        raise Refused("responses_create_params.input", "must be text or a list of items")
    return shown


def _agent(row: Row) -> str:
    name = _object(row, "agent_ref").get("name") if "agent_ref" in row else None
    return f"nemo-gym {name}" if name else "nemo-gym"


def _tools(request: Row) -> list[Row] | None:
    given = request.get("tools")
    return [tool for tool in given if isinstance(tool, dict)] if isinstance(given, list) and given else None


def _sampling(request: Row) -> Sampling:
    names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
    given = {ours: request[name] for name, ours in names.items() if request.get(name) is not None}
    with refusing_invalid("responses_create_params"):
        return Sampling.model_validate(given)


def _verdict(row: Row, reward: float, graded: str) -> Verdict:
    """What their verifier said: who it was and how it graded is not known here, so it is not trusted."""
    components = row.get("reward_components")
    named = components if isinstance(components, dict) else {}
    with refusing_invalid("reward_components"):
        return Verdict(
            reward=None if row.get("mask_sample") is True else reward, components=named, trust=Trust.NONE,
            failure_kind=row.get("failure_kind"), grader="nemo-gym", graded_hash=graded,
        )  # fmt: skip


def _object(row: Row, name: str) -> Row:
    value = row.get(name)
    if not isinstance(value, dict):
        raise Refused(name, "is missing" if name not in row else "must be an object")
    return value


def _number(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Refused(field, f"must be a finite number, not {value!r:.40}")
    return float(value)


NEMO_GYM = RunFormat(
    name="nemo-gym",
    read=row_reader(read, lines=True),
    write_run=lambda run, opening, tools: write(run, opening, tools=tools),
)
