"""OpenAI messages, a conversation a line, as SFT trainers take them.

`text`: the calls stand in the assistant's text, as the policy wrote them: `nano-rl sft` reads it back.
`native`: the calls stand beside it in `tool_calls`, and the tools in `tools`, for a chat template to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from nano_coder.agent.dialects.hermes import HERMES
from nano_coder.formats.run_format import RunFormat
from nano_shared.refusal import Refused
from nano_shared.types import Message, Observation, Trajectory, Turn

Calls = Literal["text", "native"]
SAID_BY_USER = "user"
"""tool of an observation that is a message of the user in the middle of a run"""


def write(
    run: Trajectory,
    opening: Sequence[Message] | None,
    *,
    calls: Calls = "text",
    tools: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Raises Refused for a run that has nothing to imitate, or whose first messages nobody knows any more."""
    if not run.turns:
        raise Refused("turns", "it holds no turn")
    if opening is None:
        raise Refused("profile", f"{run.profile} is another one in this version: what it showed is not known")
    rows: list[dict[str, Any]] = [{"role": m.role.value, "content": m.content} for m in opening]
    for turn in run.turns:
        if turn.is_aside:  # the conversation is whole here
            continue
        rows += _text_rows(turn) if calls == "text" else _native_rows(turn)
    while rows[-1]["role"] != "assistant":  # nothing of the policy follows
        rows.pop()
    return {"messages": rows} | ({"tools": tools} if calls == "native" and tools else {})


def _text_rows(turn: Turn) -> list[dict[str, Any]]:
    seen = [{"role": _role(o), "content": o.text} for o in turn.observations]
    said = turn.completion.text
    if turn.completion.api is not None and turn.completion.api.calls:
        try:
            said = HERMES.render(turn.thought, turn.calls, ())
        except ValueError as problem:
            raise Refused("turns", str(problem)) from None
    return [{"role": "assistant", "content": said}, *seen]


def _native_rows(turn: Turn) -> list[dict[str, Any]]:
    if not turn.calls:
        return _text_rows(turn)
    calls = [
        {
            "id": call_id(turn.index, position),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for position, call in enumerate(turn.calls)
    ]
    rows: list[dict[str, Any]] = [{"role": "assistant", "content": turn.thought, "tool_calls": calls}]
    for position, observation in enumerate(turn.observations):
        row: dict[str, Any] = {"role": _role(observation), "content": observation.text}
        if row["role"] == "tool" and position < len(turn.calls):
            row |= {"tool_call_id": calls[position]["id"], "name": turn.calls[position].name}
        rows.append(row)
    return rows


def _role(observation: Observation) -> str:
    return "user" if observation.tool == SAID_BY_USER else "tool"


def call_id(turn: int, position: int) -> str:
    return f"call_{turn}_{position}"


MESSAGES = RunFormat(
    name="messages", write_run=lambda run, opening, tools: write(run.trajectory, opening, tools=tools)
)
